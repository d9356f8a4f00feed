//! Checklist 11: every length, every MTU.

use bowline_verbs::{Mtu, SendOp, Status, WcOpcode};

use crate::world::{EVERY, Setup, World, pattern};

fn lengths(mtu: usize) -> [usize; 9] {
    [0, 1, 3, 4, mtu - 1, mtu, mtu + 1, 2 * mtu, 1 << 20]
}

fn world(mtu: Mtu) -> World {
    World::new(&Setup { mtu, ..Setup::default() })
}

/// [REQ-2], [REQ-3], [REQ-15], [RSP-21].
#[test]
fn sends() {
    for mtu in Mtu::ALL {
        let mut world = world(mtu);
        for (i, len) in lengths(mtu.bytes()).into_iter().enumerate() {
            let bytes = pattern(len, i);
            let (from, to) = (world.a.filled(&bytes, EVERY), world.b.region(len + 4, EVERY));
            world.recv(i as u64, &[to.sge(0, len + 4)]);
            let op = if i % 2 == 0 { SendOp::Send } else { SendOp::SendImm(i as u32) };
            world.send(i as u64, op, &[from.sge(0, len)]);
            world.settle();
            assert_eq!(to.bytes(0, len), bytes);
            let sent = world.a.done.pop().unwrap();
            assert_eq!((sent.status, sent.byte_len as usize), (Status::Success, len));
            let received = world.b.done.pop().unwrap();
            assert_eq!((received.status, received.byte_len as usize), (Status::Success, len));
            assert_eq!(received.opcode, WcOpcode::Recv);
            assert_eq!(received.imm, (i % 2 == 1).then_some(i as u32));
        }
        assert_eq!(world.a.device.counters().go_backs, 0);
    }
}

/// [REQ-2], [RSP-8].
#[test]
fn writes() {
    for mtu in Mtu::ALL {
        let mut world = world(mtu);
        for (i, len) in lengths(mtu.bytes()).into_iter().enumerate() {
            let bytes = pattern(len, i);
            let from = world.a.filled(&bytes, EVERY);
            let (one, two) = (world.b.region(len, EVERY), world.b.region(len, EVERY));
            world.recv(7, &[]);
            world.send(0, SendOp::Write(one.remote(0)), &[from.sge(0, len)]);
            world.send(1, SendOp::WriteImm(two.remote(0), 5), &[from.sge(0, len)]);
            world.settle();
            assert_eq!(world.a.statuses(), [(0, Status::Success), (1, Status::Success)]);
            assert_eq!(one.bytes(0, len), bytes);
            assert_eq!(two.bytes(0, len), bytes);
            let received = world.b.done.pop().unwrap();
            assert_eq!((received.imm, received.byte_len as usize), (Some(5), len));
            assert_eq!(received.opcode, WcOpcode::RecvRdmaWithImm);
        }
        assert_eq!(world.a.device.counters().go_backs, 0);
    }
}

/// [REQ-3], [RSP-14].
#[test]
fn reads() {
    for (mtu, gso) in Mtu::ALL.into_iter().flat_map(|mtu| [(mtu, true), (mtu, false)]) {
        let mut world = World::new(&Setup { mtu, gso, ..Setup::default() });
        for (i, len) in lengths(mtu.bytes()).into_iter().enumerate() {
            let bytes = pattern(len, i);
            let (to, from) = (world.a.region(len + 9, EVERY), world.b.filled(&bytes, EVERY));
            let (first, second) = (len / 3, len - len / 3);
            let sges = [to.sge(0, first), to.sge(first + 9, second)];
            world.send(3, SendOp::Read(from.remote(0)), &sges);
            world.settle();
            assert_eq!(world.a.statuses(), [(3, Status::Success)]);
            assert_eq!(to.bytes(0, first), bytes[..first]);
            assert_eq!(to.bytes(first, 9), [0; 9]);
            assert_eq!(to.bytes(first + 9, second), bytes[first..]);
        }
        assert_eq!(world.a.device.counters().go_backs, 0);
    }
}
