//! Processes that serve disks and are replaced, or killed and started again, while their clients
//! write: nothing fails, nothing is lost.

use std::{
    fs::{self, OpenOptions},
    io::{Read, Write},
    thread,
};

use crate::disk_clients::{
    BLOCK, BLOCKS, Nbd, PATIENCE, READ, Shared, Stop, WRITE, WRITERS, compare, content, end,
    export, header, joined, map, read_file, while_written, with_fuse, write_file,
};
use crate::rnbd_successors::Successor;
use crate::support::{Folder, Running, run};

/// Starts a process that replaces the former one, which ends.
fn replace(folder: &Folder, host: u8, more: &[&str], process: &mut Running) {
    let mut next = map(folder, host, &[more, &["--replace"]].concat());
    next.expect("mapped disk0 ");
    let former = std::mem::replace(process, next).finish().exits(0);
    assert!(former.out.contains("handed over\n"), "{former:?}");
}

#[test]
fn clients_of_nbd_stay_connected_when_their_process_is_replaced() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, image) = export(&folder, 1, &[]);
    let place = folder.path().join("nbd.sock");
    let doors = ["--nbd", place.to_str().expect("a plain path")];
    let mut client = map(&folder, 1, &doors);
    client.expect("mapped disk0 ");

    let shared = Shared::default();
    let far = WRITERS * BLOCKS;
    // One is idle, one has sent a part of a request, one does not read what it has asked for.
    let mut idle = Nbd::connect(&place).expect("connected");
    let mut half = Nbd::connect(&place).expect("connected");
    let mut ask = header(WRITE, 7, far * BLOCK as u64, 100 * BLOCK);
    let (first, second) = (content(1, 1), (1..100).flat_map(|n| content(1, n)).collect::<Vec<_>>());
    ask.extend(&first);
    half.0.write_all(&ask).expect("half a request");
    let mut slow = Nbd::connect(&place).expect("connected");
    let big = 256 * BLOCK;
    for n in 0..16 {
        slow.0.write_all(&header(READ, n, 2 << 20, big)).expect("asked");
    }
    let (written, gaps) = thread::scope(|scope| {
        let stop = Stop(&shared);
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (shared, place) = (&shared, &place);
                scope.spawn(move || {
                    let _stop = Stop(shared);
                    Nbd::connect(place).expect("connected").write_until(writer, shared)
                })
            })
            .collect();
        for _ in 0..3 {
            shared.advance();
            replace(&folder, 1, &doors, &mut client);
        }
        shared.advance();
        drop(stop);
        joined(writers)
    });
    println!("longest times without an answer: {gaps:?}");
    half.0.write_all(&second).expect("the rest of the request");
    assert_eq!(half.reply(), 7);
    assert!(idle.read(far) == first);
    assert!(idle.read(far + 99) == content(1, 99));
    for _ in 0..16 {
        assert!(slow.reply() < 16);
        slow.0.read_exact(&mut vec![0; big]).expect("data");
    }
    compare(&written, &image, |block| idle.read(block));
    end(client);
    assert!(!place.exists());
    end(server);
}

#[test]
fn a_file_stays_open_when_its_process_is_replaced() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, image) = export(&folder, 2, &[]);
    let dir = folder.path().join("files");
    let doors = ["--fuse", dir.to_str().expect("a plain path")];
    let Some(mut client) = with_fuse(map(&folder, 2, &doors), "mapped disk0 ") else { return };
    let place = dir.join("rnbd0");
    let file = OpenOptions::new().read(true).write(true).open(&place).expect("the disk");
    let shared = Shared::default();
    let (written, gaps) = thread::scope(|scope| {
        let stop = Stop(&shared);
        let (file, shared) = (&file, &shared);
        let write = |writer| move || write_file(file, writer, BLOCKS, true, shared);
        let writers = (0..WRITERS).map(|writer| scope.spawn(write(writer))).collect();
        for _ in 0..3 {
            shared.advance();
            replace(&folder, 2, &doors, &mut client);
        }
        shared.advance();
        drop(stop);
        joined(writers)
    });
    println!("longest requests: {gaps:?}");
    compare(&written, &image, |block| read_file(&file, block));
    // The process that has the mount knows that the file is open, and unmounts it at its end.
    let unmap = run(&folder, &["rnbd", "unmap", "rnbd0"]);
    assert_ne!(unmap.code, Some(0), "{unmap:?}");
    drop(file);
    end(client);
    assert!(!place.exists());
    end(server);
}

/// The next process says at its end what of the former one's writes may be lost, and no more.
#[test]
fn what_was_not_flushed_is_known_to_the_next_process() {
    // tests [NB-70] [NB-73]
    for (host, writes, flushes) in [(50, false, false), (51, true, true), (52, true, false)] {
        let folder = Folder::new();
        let (server, _) = export(&folder, host, &[]);
        let place = folder.path().join("nbd.sock");
        let doors = ["--nbd", place.to_str().expect("a plain path")];
        let mut client = map(&folder, host, &doors);
        client.expect("mapped disk0 ");
        let mut nbd = Nbd::connect(&place).expect("connected");
        if writes {
            nbd.send(3, 3).expect("asked");
            assert_eq!(nbd.reply(), 3);
        }
        if flushes {
            nbd.flush();
        }
        replace(&folder, host, &doors, &mut client);
        nbd.read(3);
        server.signal("-KILL");
        client.expect("rnbd0 offline");
        client.signal("-TERM");
        let is_lost = writes && !flushes;
        let done = client.finish().exits(is_lost.into());
        let line = "rnbd0: what was written was not made durable: its server is not connected";
        assert_eq!(done.err.contains(line), is_lost, "{done:?}");
    }
}

#[test]
fn requests_wait_while_a_server_is_replaced() {
    // tests [NB-71]
    let folder = Folder::new();
    let (mut server, image) = export(&folder, 3, &[]);
    let place = folder.path().join("nbd.sock");
    let mut client = map(&folder, 3, &["--nbd", place.to_str().expect("a plain path")]);
    client.expect("mapped disk0 ");
    while_written(&place, &image, |shared| {
        for _ in 0..2 {
            let (next, _) = export(&folder, 3, &["--replace"]);
            let former = std::mem::replace(&mut server, next).finish().exits(0);
            assert!(former.out.contains("handed over\n"), "{former:?}");
            shared.advance();
        }
    });
    end(client);
    end(server);
}

#[test]
fn a_process_continues_when_the_next_one_does_not() {
    // tests [NB-70]
    let folder = Folder::new();
    let (server, image) = export(&folder, 4, &[]);
    let place = folder.path().join("nbd.sock");
    let text = place.to_str().expect("a plain path");
    let doors = ["--nbd", text];

    let none = map(&folder, 4, &["--nbd", text, "--replace"]).finish().exits(254);
    none.complains(&["nothing to replace", "disk0", "leave out --replace"]);

    let mut client = map(&folder, 4, &doors);
    client.expect("mapped disk0 ");
    while_written(&place, &image, |shared| {
        let others = map(&folder, 4, &["--replace"]).finish().exits(1);
        others.complains(&["other front ends", "--nbd"]);
        // The same names elsewhere are another disk.
        let words = ["rnbd", "map", "disk0", "--from", "s1", "--path", "127.75.4.11@127.75.4.9"];
        let words = [&words[..], &doors, &["--replace"]].concat();
        run(&folder, &words).exits(1).complains(&["a server at other addresses"]);
        shared.advance();

        // One that is killed after it was given everything.
        let mut next = Successor::connect(&folder, &client);
        next.ask(4, Some(&place), None, PATIENCE);
        next.take_all();
        drop(next);
        client.until_logged("this one does");
        shared.advance();
    });
    // It can be replaced still.
    while_written(&place, &image, |_| replace(&folder, 4, &doors, &mut client));
    let done =
        run(&folder, &["rnbd", "export", "--memory", "m=1MiB", "-I", "127.75.4.9", "--replace"]);
    done.exits(2);
    end(client);
    end(server);
    assert!(!fs::exists(place).expect("a folder"));
}

/// The name of a disk that commands have unmapped and mapped may be another one's by now.
#[test]
fn what_commands_have_mapped_goes_to_no_other_process() {
    let folder = Folder::new();
    let (server, _) = export(&folder, 6, &[]);
    let place = folder.path().join("nbd.sock");
    let doors = ["--nbd", place.to_str().expect("a plain path"), "--stay"];
    let mut client = map(&folder, 6, &doors);
    client.expect("mapped disk0 ");
    run(&folder, &["rnbd", "unmap", "rnbd0"]).exits(0);
    let path = "127.75.6.11@127.75.6.1";
    run(&folder, &["rnbd", "map", "disk0", "from", "s2", path]).exits(0);
    let refused = map(&folder, 6, &[&doors[..], &["--replace"]].concat()).finish().exits(1);
    refused.complains(&["a command has mapped or unmapped disks"]);
    end(client);
    end(server);
}

#[test]
fn clients_of_nbd_come_back_to_a_process_that_was_killed() {
    // tests [NB-70] [RT-92]
    let folder = Folder::new();
    let (server, image) = export(&folder, 5, &[]);
    let place = folder.path().join("nbd.sock");
    let doors = ["--nbd", place.to_str().expect("a plain path")];
    let begin = || {
        let mut client = map(&folder, 5, &doors);
        client.expect("mapped disk0 ");
        client
    };
    let mut client = Some(begin());
    let shared = Shared::default();
    let (written, gap) = thread::scope(|scope| {
        let stop = Stop(&shared);
        let writer = scope.spawn(|| {
            let _stop = Stop(&shared);
            Nbd::write_and_reconnect(&place, 0, &shared)
        });
        for _ in 0..3 {
            shared.advance();
            let dying = client.take().expect("it runs");
            dying.signal("-KILL");
            assert_eq!(dying.finish().code, None, "it was killed");
            client = Some(begin());
        }
        shared.advance();
        drop(stop);
        writer.join().expect("no request fails")
    });
    println!("longest time without an answer: {gap:?}");
    let mut reader = Nbd::connect(&place).expect("connected");
    compare(&written, &image, |block| reader.read(block));
    end(client.expect("it runs"));
    end(server);
}
