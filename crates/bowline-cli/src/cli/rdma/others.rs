//! `bowline rdma-core`, not shown in help: the other side of rdma-core's `ucmatose` and
//! `ibv_rc_pingpong`, for the interop runs. Learned from what these programs put on the wire.
//!
//! ```text
//! ucmatose:   connect; the server sends N messages, then the client as many; the server ends it
//! pingpong:   over TCP client, then server: "LID:QPN:PSN:GID" in hexadecimal and a zero, then the
//!             client "done" and a zero; no connection manager; messages in turn, the client first
//! ```

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream};

use bowline_base::entropy::random_u64;
use bowline_node::{
    Failure, Outcome,
    signals::Stop,
    values::{number, number32},
};
use bowline_verbs::{Access, AddressVector, ConnParam, Device, Mtu, Qpn, SendOp};

use super::Ended;
use super::arrivals::Arrivals;
use super::link::{Link, Memory, Path, QueuePairOptions};
use super::serving::Side;

/// Byte that fills the messages of `ibv_rc_pingpong`.
const FILLING: u8 = 0x7b;
/// Bytes of its text, the zero included.
const TEXT: usize = 52;
const DONE: &[u8] = b"done\0";
/// Least number of receives posted, for any number of messages.
const RECEIVES: u64 = 64;

/// The program on the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Program {
    Ucmatose,
    Pingpong,
}

/// Be the other side of a test program of rdma-core.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The program on the other side
    #[arg(value_enum)]
    program: Program,
    #[command(flatten)]
    side: Side,
    /// Bytes of a message
    #[arg(long, value_name = "BYTES", default_value = "100", value_parser = number32)]
    size: u32,
    /// Messages each way
    #[arg(short = 'n', long, value_name = "N", default_value = "10", value_parser = number)]
    iters: u64,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    args.side.check()?;
    let stop = Stop::install()?;
    match (args.program, &args.side.client) {
        (Program::Ucmatose, Some(server)) => ucmatose_client(args, server, &stop),
        (Program::Ucmatose, None) => ucmatose_server(args, &stop),
        (Program::Pingpong, _) => pingpong(args, &stop),
    }
}

fn ucmatose_client(args: &Args, server: &str, stop: &Stop) -> Outcome {
    let (opened, local, remote) = args.side.local.towards(server)?;
    let device = &opened.device;
    let arrivals = Arrivals::new(&**device, stop);
    let make = || {
        let (link, memory) = prepare(args, &**device, stop, args.iters)?;
        let param = param(&link);
        Ok((link, memory, param))
    };
    let limit = args.side.local.timeout;
    let (mut link, memory, id, _) = arrivals.connect((local, remote), limit, make)?;
    let mut seen = Seen::default();
    seen.wait(&mut link, 0, args.iters)?;
    for _ in 0..args.iters {
        link.send(1, SendOp::Send, memory.part(0, args.size as usize))?;
    }
    seen.wait(&mut link, args.iters, args.iters)?;
    if !arrivals.left(id, args.side.local.timeout)? {
        return Err(Failure::failed("the server does not disconnect"));
    }
    say!("{} messages each way", args.iters);
    Ok(())
}

fn ucmatose_server(args: &Args, stop: &Stop) -> Outcome {
    let (opened, places) = args.side.local.serving()?;
    let device = &opened.device;
    let arrivals = Arrivals::new(&**device, stop);
    opened.listen(&places, false)?;
    let (id, request) = arrivals.request(None)?;
    let (mut link, memory) = prepare(args, &**device, stop, args.iters)?;
    link.bind(id);
    device.accept(id, &param(&link))?;
    arrivals.accepted(id, &request)?;
    for _ in 0..args.iters {
        link.send(1, SendOp::Send, memory.part(0, args.size as usize))?;
    }
    Seen::default().wait(&mut link, args.iters, args.iters)?;
    device.disconnect(id)?;
    arrivals.disconnected(id);
    say!("{} messages each way", args.iters);
    Ok(())
}

fn pingpong(args: &Args, stop: &Stop) -> Outcome {
    let failed = |error: std::io::Error| Failure::failed(format!("the exchange over TCP: {error}"));
    let first = args.side.client.is_some();
    let (opened, mut stream) = match &args.side.client {
        Some(server) => {
            let (opened, _, remote) = args.side.local.towards(server)?;
            (opened, TcpStream::connect(remote).map_err(failed)?)
        }
        None => {
            let (opened, places) = args.side.local.serving()?;
            let listener = TcpListener::bind(places.as_slice()).map_err(failed)?;
            say!("listening on {}", listener.local_addr().map_err(failed)?);
            (opened, listener.accept().map_err(failed)?.0)
        }
    };
    stream.set_read_timeout(Some(args.side.local.timeout)).map_err(failed)?;
    let local = stream.local_addr().map_err(failed)?.ip();
    let (mut link, memory) = prepare(args, &*opened.device, stop, RECEIVES)?;
    memory.buffer.write(0, &vec![FILLING; args.size as usize]);
    let mine = End { qpn: link.qpn(), psn: random_u64() as u32 & 0xff_ffff, gid: local };
    if first {
        stream.write_all(&mine.encode()).map_err(failed)?;
    }
    let mut text = [0; TEXT];
    stream.read_exact(&mut text).map_err(failed)?;
    let theirs = End::decode(&text).ok_or_else(|| Failure::failed("not ibv_rc_pingpong"))?;
    let av = AddressVector { local, remote: theirs.gid, flow_label: 0, tos: 0 };
    let mtu = args.side.local.mtu().unwrap_or(Mtu::M1024);
    link.go(&Path { av, mtu, dest: theirs.qpn, rq_psn: theirs.psn, sq_psn: mine.psn })?;
    if first {
        stream.write_all(DONE).map_err(failed)?;
    } else {
        stream.write_all(&mine.encode()).map_err(failed)?;
        let mut done = [0; DONE.len()];
        stream.read_exact(&mut done).map_err(failed)?;
    }
    let (mut sent, mut received, mut seen) = (0, 0, Seen::default());
    if first {
        link.send(1, SendOp::Send, memory.part(0, args.size as usize))?;
        sent += 1;
    }
    while received < args.iters {
        received += 1;
        seen.wait(&mut link, 0, received)?;
        link.receive(received, Some(memory.part(0, args.size as usize)))?;
        if sent < args.iters {
            link.send(1, SendOp::Send, memory.part(0, args.size as usize))?;
            sent += 1;
        }
    }
    seen.wait(&mut link, sent, received)?;
    let mut got = vec![0; args.size as usize];
    memory.buffer.read(0, &mut got);
    if got.iter().any(|byte| *byte != FILLING) {
        return Err(Failure::failed("not the bytes of ibv_rc_pingpong"));
    }
    say!("{} messages each way", args.iters);
    // The other side may still wait for an acknowledgement, and for the end of the TCP connection.
    stop.wait(Some(std::time::Duration::from_millis(300)));
    Ok(())
}

/// Number of completions so far.
#[derive(Debug, Default)]
struct Seen {
    sends: u64,
    receives: u64,
}

impl Seen {
    /// Waits until this many requests have completed in total.
    fn wait(&mut self, link: &mut Link<'_>, sends: u64, receives: u64) -> Result<(), Ended> {
        while self.sends < sends || self.receives < receives {
            match link.completion()?.is_recv() {
                true => self.receives += 1,
                false => self.sends += 1,
            }
        }
        Ok(())
    }
}

/// What the two sides of `ibv_rc_pingpong` exchange over TCP: the address of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct End {
    qpn: Qpn,
    psn: u32,
    gid: IpAddr,
}

impl End {
    fn encode(&self) -> Vec<u8> {
        let gid = match self.gid {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let (qpn, psn, gid) = (self.qpn.0, self.psn, u128::from(gid));
        format!("0000:{qpn:06x}:{psn:06x}:{gid:032x}\0").into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?.strip_suffix('\0')?;
        let mut parts = text.split(':').skip(1);
        let qpn = Qpn(u32::from_str_radix(parts.next()?, 16).ok()?);
        let psn = u32::from_str_radix(parts.next()?, 16).ok()?;
        let gid = Ipv6Addr::from(u128::from_str_radix(parts.next()?, 16).ok()?);
        let gid = gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4);
        Some(Self { qpn, psn, gid })
    }
}

/// Makes the queue pair and posts its receives.
fn prepare<'a>(
    args: &Args,
    device: &'a dyn Device,
    stop: &'a Stop,
    receives: u64,
) -> Result<(Link<'a>, Memory), Ended> {
    let (poll, timeout) = (args.side.local.poll, args.side.local.timeout);
    let (sends, slots) = (args.iters as usize + 16, receives as usize + 16);
    let access = Access::LOCAL_WRITE;
    let options = QueuePairOptions {
        access,
        sends: sends.min(4096),
        receives: slots.min(4096),
        queue_pairs: 1,
        poll,
        timeout,
    };
    let mut link = Link::new(device, stop, options)?;
    let memory = link.memory(args.size as usize, access)?;
    for n in 0..receives {
        link.receive(n, Some(memory.part(0, args.size as usize)))?;
    }
    Ok((link, memory))
}

fn param(link: &Link<'_>) -> ConnParam {
    let (responder_resources, initiator_depth) = (1, 1);
    ConnParam { qpn: link.qpn(), responder_resources, initiator_depth, ..ConnParam::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_that_of_rc_pingpong() {
        // As the program of a kernel's machine sent it.
        let bytes = b"0000:000011:f200f9:00000000000000000000ffff0a63000b\0";
        assert_eq!(bytes.len(), TEXT);
        let end = End::decode(bytes).unwrap();
        let gid = IpAddr::from([10, 99, 0, 11]);
        assert_eq!(end, End { qpn: Qpn(0x11), psn: 0xf2_00f9, gid });
        assert_eq!(end.encode(), bytes);
        for text in [&b"0000:000011:f200f9"[..], b"", b"0:1:2:3", &[0xff; TEXT]] {
            assert_eq!(End::decode(text), None);
        }
    }
}
