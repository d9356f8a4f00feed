//! Cases of TCP in which its model was once wrong.

use std::net::{IpAddr, SocketAddr};

use bowline_wire::rds::TCP_PORT;

use super::{Cut, EndId, HostNet, Net, NetEvent, NetPlan, Notice, ReadOutcome, Reason, TcpClose};
use crate::engine::queue::{MS, SEC};
use crate::engine::rng::Rng;
use crate::engine::trace::{Trace, TraceMode};
use crate::rds::ctx::{Ctx, Event};

/// Makes two hosts, 10.0.0.1 and 10.0.0.2, of which the second may be a kernel, and a network
/// without faults between them.
pub(crate) fn two_hosts(kernel: bool) -> Ctx {
    let host = |last, kernel| HostNet {
        up: true,
        boot: 0,
        addrs: vec![IpAddr::from([10, 0, 0, last])],
        listening: true,
        closing: false,
        kernel,
        end_to_end: false,
    };
    let plan = NetPlan {
        delay: (MS, MS),
        segment_max: 1400,
        segment_random: false,
        send_buffer: (65_536, 65_536),
        recv_buffer: (65_536, 65_536),
        loss_permille: 0,
        rst_overtakes: false,
        cut_permille: 0,
        port_permille: 0,
    };
    let net = Net::new(vec![host(1, false), host(2, kernel)], plan);
    Ctx::new(Rng::new(1), net, Trace::new(TraceMode::Hash))
}

/// Connects the first host to the second; returns its end, and the end to be accepted.
fn connect(ctx: &mut Ctx) -> (EndId, EndId) {
    let to = SocketAddr::from(([10, 0, 0, 2], TCP_PORT));
    let end = ctx.tcp_connect(0, IpAddr::from([10, 0, 0, 1]), None, to).expect("an end");
    (end, end.other())
}

/// Runs all pending events and their consequences.
fn run(ctx: &mut Ctx) {
    while let Some(event) = ctx.next_event() {
        if let Event::Net(event) = event {
            ctx.net_event(event);
        }
    }
}

/// Delivers the three packets of a handshake; the listener's process accepts the connection.
fn shake_hands(ctx: &mut Ctx, accepted: EndId) {
    let conn = accepted.conn;
    ctx.net_event(NetEvent::Syn { conn });
    ctx.net_event(NetEvent::SynAck { conn });
    ctx.net_event(NetEvent::Established { conn });
    assert!(ctx.net.accept(accepted));
}

/// The last packet of a handshake is lost. A segment behind it completes the handshake, so the
/// process has the connection when it breaks. The dialler is gone when the lost packet would be
/// repeated.
#[test]
fn an_accepted_connection_never_ends_untold() {
    let mut ctx = two_hosts(false);
    let (dialled, accepted) = connect(&mut ctx);
    let conn = dialled.conn;
    ctx.net_event(NetEvent::Syn { conn });
    ctx.net_event(NetEvent::SynAck { conn });
    assert_eq!(ctx.tcp_write(dialled, b"hello"), Ok(5));
    ctx.net_event(NetEvent::Segment { conn, side: 0, start: 0, end: 5, fin: false });
    assert!(ctx.notices.contains(&(accepted, Notice::Incoming)));
    assert!(ctx.net.accept(accepted));
    ctx.tcp_cut(conn, Cut::Blackhole);
    ctx.tcp_close(dialled, TcpClose::Reset);
    ctx.net_event(NetEvent::Established { conn });
    ctx.notices.clear();
    let begun = ctx.now;
    run(&mut ctx);
    assert!(ctx.notices.contains(&(accepted, Notice::Readable)), "told");
    let mut bytes = Vec::new();
    assert_eq!(ctx.tcp_read(accepted, &mut bytes, 100), ReadOutcome::Data(5));
    assert_eq!(ctx.tcp_read(accepted, &mut bytes, 100), ReadOutcome::Failed(Reason::TimedOut));
    assert!(ctx.now < begun + 40 * SEC, "by keepalive");
}

/// One end gives up bytes of which the other end never heard. The other end, which has nothing to
/// send, must not keep the connection open for ever.
#[test]
fn an_idle_end_learns_that_the_other_timed_out() {
    let mut ctx = two_hosts(false);
    let (dialled, accepted) = connect(&mut ctx);
    shake_hands(&mut ctx, accepted);
    ctx.break_end(accepted, Reason::TimedOut);
    let begun = ctx.now;
    ctx.notices.clear();
    run(&mut ctx);
    assert!(ctx.notices.contains(&(dialled, Notice::Readable)), "told");
    let mut bytes = Vec::new();
    assert_eq!(ctx.tcp_read(dialled, &mut bytes, 100), ReadOutcome::Failed(Reason::Reset));
    assert!(ctx.now < begun + 6 * SEC, "by the first keepalive");
}

/// A process stops while a connection waits at its listener. The dialler, which got no answer, asks
/// again and meets the next process, for which the earlier connection does not count.
#[test]
fn a_connection_that_is_asked_for_again_begins_anew() {
    let mut ctx = two_hosts(false);
    let (dialled, accepted) = connect(&mut ctx);
    let conn = dialled.conn;
    ctx.net_event(NetEvent::Syn { conn });
    ctx.tcp_host_down(1, false);
    ctx.net.hosts[1].listening = true;
    shake_hands(&mut ctx, accepted);
    assert_eq!(ctx.tcp_write(accepted, b"hello"), Ok(5));
    ctx.net_event(NetEvent::Segment { conn, side: 1, start: 0, end: 5, fin: false });
    let mut bytes = Vec::new();
    assert_eq!(ctx.tcp_read(dialled, &mut bytes, 100), ReadOutcome::Data(5));
}
