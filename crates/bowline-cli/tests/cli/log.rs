//! Commands whose output cannot be written, or is too much.

use std::{
    fs::{File, OpenOptions},
    io::{ErrorKind, Write},
    os::fd::AsRawFd,
    os::unix::fs::OpenOptionsExt,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use bowline_roce_driver::{SoftConfig, SoftDevice};
use bowline_verbs::{CmEvent, ConnParam, Device, QpInit, QpType};

use crate::support::{Folder, Running, run, start, start_into};

const DEADLINE: Duration = Duration::from_secs(60);

/// Starts a node with standard output `out`, and waits until it answers.
fn node(out: File, folder: &Folder, address: &str) -> Running {
    let node = start_into(out, folder, &["node", "--address", address]);
    let begin = Instant::now();
    while run(folder, &["info", "-c"]).code != Some(0) {
        assert!(begin.elapsed() < DEADLINE, "the node never answers");
    }
    node
}

/// Both ends of a full pipe. Its writer cannot know that no process reads it.
fn full_pipe() -> (std::io::PipeReader, File) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    // Another description of the same pipe: the node's own blocks, as those of shells do.
    let place = format!("/proc/self/fd/{}", writer.as_raw_fd());
    const O_NONBLOCK: i32 = 0o4000;
    let filling = OpenOptions::new().write(true).custom_flags(O_NONBLOCK).open(place);
    let mut filling = filling.expect("the pipe");
    for piece in [&[b'x'; 4096][..], b"x"] {
        while filling.write(piece).map_err(|error| error.kind()) != Err(ErrorKind::WouldBlock) {}
    }
    (reader, File::from(std::os::fd::OwnedFd::from(writer)))
}

#[test]
fn a_node_serves_on_without_a_log() {
    let folder = Folder::new();
    let full = OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    let node = node(full, &folder, "127.44.1.1");
    for _ in 0..2 {
        // Each makes an entry in the log.
        run(&folder, &["ping", "-c", "1", "-I", "127.44.1.2", "127.44.1.1"]).exits(0);
    }
    run(&folder, &["info", "-c"]).exits(0);
    node.signal("-TERM");
    node.finish().exits(0);
}

#[test]
fn a_node_obeys_when_nobody_reads_its_log() {
    let folder = Folder::new();
    let (reader, writer) = full_pipe();
    let node = node(writer, &folder, "127.44.2.1");
    run(&folder, &["ping", "-c", "1", "-I", "127.44.2.2", "127.44.2.1"]).exits(0);
    node.signal("-TERM");
    node.finish().exits(0);
    drop(reader);
}

#[test]
fn results_wait_for_who_reads_them_and_a_signal_ends_the_wait() {
    let folder = Folder::new();
    let (reader, writer) = full_pipe();
    let words = ["ping", "-c", "2", "-i", "10ms", "-I", "127.44.3.2", "127.44.3.1"];
    let _node = start(&folder, &["node", "--address", "127.44.3.1"]).expect("ready");
    let ping = start_into(writer, &folder, &words);
    ping.until_it_heeds(15);
    ping.signal("-TERM");
    let _ = ping.finish();
    drop(reader);
}

#[test]
fn a_stream_that_nobody_reads_ends_with_a_signal() {
    let folder = Folder::new();
    for signal in ["-TERM", "-INT"] {
        let (reader, writer) = full_pipe();
        let words = ["recv", "-s", "127.44.6.1:5000", "-i", "50ms"];
        let receiver = start_into(writer, &folder, &words);
        receiver.until_told("0 messages");
        let file = folder.write("in", "text");
        // Nothing is written, so nothing is confirmed.
        let words = ["send", "-W", "0", "-s", "127.44.6.2:5000", "-d", "127.44.6.1:5000", "-f"];
        run(&folder, &[&words[..], &[file.to_str().expect("a path")]].concat()).exits(0);
        // The receiver's node has the message when the sender is done; the program may not have
        // read it yet.
        thread::sleep(Duration::from_millis(200));
        receiver.signal(signal);
        let done = receiver.finish().exits(1);
        assert!(done.err.contains("stopped before everything was written"), "{done:?}");
        drop(reader);
    }
}

#[test]
fn a_sender_does_not_wait_for_its_input_or_receivers_when_it_is_to_stop() {
    let folder = Folder::new();
    let pipe = folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo runs").success());
    // There is no such receiver.
    let words = ["send", "-s", "127.44.7.2:5000", "-d", "127.44.7.1:5000", "-f"];
    let words = [&words[..], &[pipe.to_str().expect("a path")]].concat();
    for text in ["", "text"] {
        let sender = start(&folder, &words);
        // Opened when both have done so.
        let mut input = OpenOptions::new().write(true).open(&pipe).expect("the pipe");
        sender.until_it_heeds(15);
        input.write_all(text.as_bytes()).expect("room");
        let kept = if text.is_empty() { Some(input) } else { None };
        thread::sleep(Duration::from_millis(200));
        let begin = Instant::now();
        sender.signal("-TERM");
        let done = sender.finish().exits(1);
        // The command then does not wait half a minute for the end of the stream.
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}, {done:?}", begin.elapsed());
        drop(kept);
    }
}

#[test]
fn results_that_cannot_be_written_are_an_error_with_a_reason() {
    let folder = Folder::new();
    for words in [&["devices"][..], &["ping", "-c", "1", "-I", "127.44.4.2", "127.44.4.1"]] {
        let full = OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
        let done = start_into(full, &folder, words).finish().exits(1);
        done.complains(&["cannot write to standard output: No space left"]);
    }
}

#[test]
fn peers_do_not_decide_how_long_a_log_gets() {
    let folder = Folder::new();
    let mut looker = start(&folder, &["cm-listen", "--address", "127.44.5.1"]);
    looker.expect("listening");
    let addrs = vec!["127.44.5.2".parse().expect("an address")];
    let device = SoftDevice::open(SoftConfig { addrs, ..SoftConfig::default() }).expect("a device");
    let (over, id) = (AtomicBool::new(false), looker.id().to_string());
    thread::scope(|scope| {
        scope.spawn(|| {
            let begin = Instant::now();
            while !over.load(Ordering::Relaxed) && begin.elapsed() < DEADLINE {
                ask(&device);
            }
            // Its output ends, whatever it has said.
            let status = std::process::Command::new("kill").args(["-TERM", &id]).status();
            assert!(status.expect("kill runs").success());
        });
        let left_out = looker.hears(" left out: peers cause more than 10 a second");
        over.store(true, Ordering::Relaxed);
        assert!(left_out, "{}", looker.said());
    });
    looker.finish().exits(0);
}

/// Sends a connection request, and waits for the refusal.
fn ask(device: &SoftDevice) {
    let pd = device.alloc_pd().expect("a domain");
    let cq = device.create_cq(16).expect("a queue");
    let qp_type = QpType::Rc;
    let init = QpInit {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        qp_type,
        cap: Default::default(),
        sq_sig_all: true,
    };
    let qpn = device.create_qp(&init).expect("a queue pair");
    let param = ConnParam { qpn, ..ConnParam::default() };
    let to = "127.44.5.1:7174".parse().expect("an address");
    let id = device.connect(None, to, &param).expect("a request");
    let begin = Instant::now();
    loop {
        assert!(begin.elapsed() < DEADLINE, "no refusal");
        if let Ok(CmEvent::Rejected { id: of, .. }) = device.cm_event(Duration::from_secs(1))
            && of == id
        {
            break;
        }
    }
    device.destroy_id(id).expect("the request");
    device.destroy_qp(qpn).expect("the queue pair");
    device.destroy_cq(cq).expect("the queue");
    device.dealloc_pd(pd).expect("the domain");
}

/// timeout(1) signals its command, and then the group that the command is in.
#[test]
fn a_signal_that_comes_twice_at_once_is_one_request() {
    let folder = Folder::new();
    for signals in [["-TERM", "-TERM"], ["-INT", "-TERM"]] {
        let mut node = start(&folder, &["node", "--address", "127.44.8.1"]);
        node.expect("ready");
        signals.iter().for_each(|signal| node.signal(signal));
        node.finish().exits(0);
    }
}
