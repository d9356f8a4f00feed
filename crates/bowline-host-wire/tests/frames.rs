//! Requests and replies are the bytes that they were before they had types, which programs and
//! nodes of other releases write and read.
#![cfg(target_endian = "little")]

use std::time::Duration;

use bowline_host_wire::{
    Call, FRAME_MAX, Features, Frame, HEAD_LEN, Head, Invalid, LockOwner, Malformed, NAME_MAX,
    NodeId, Op, Reply, Request, SendCall, SocketHandle,
};

const SOCKET: SocketHandle = SocketHandle(0x5566_7788_99aa);
const ROOM: usize = 0x1_0000_0001;
const SEND: SendCall<'static> = SendCall {
    flags: 0x40,
    may_write: true,
    name: b"name",
    control: b"control",
    payload: b"payload",
};

const fn call(call: Call<'static>) -> Request<'static> {
    Request::Call(SOCKET, call)
}

/// Each request, and its bytes on a little-endian machine as taken before.
const REQUESTS: [(Request<'static>, &str); 22] = {
    use Request::{Attach, HandOver, Hello, Interrupt, Open, ShowMemory, Wake};
    [
        (
            Hello { version: 3, features: Features(0) },
            "2000000001000000000000000000000003000000000000000000000000000000",
        ),
        (
            Open { kind: 5, protocol: 0 },
            "2000000002000000000000000000000005000000000000000000000000000000",
        ),
        (Attach, "2000000003000000000000000000000000000000000000000000000000000000"),
        (
            call(Call::Bind(b"name")),
            "2400000004000400aa9988776655000000000000000000000000000000000000\
          6e616d65",
        ),
        (
            call(Call::Connect(b"name")),
            "2400000005000400aa9988776655000000000000000000000000000000000000\
          6e616d65",
        ),
        (call(Call::LocalName), "2000000006000000aa9988776655000000000000000000000000000000000000"),
        (call(Call::PeerName), "2000000007000000aa9988776655000000000000000000000000000000000000"),
        (
            call(Call::Send(SEND)),
            "3200000008000400aa9988776655000040000000000000000700000000000000\
          6e616d65636f6e74726f6c7061796c6f6164",
        ),
        (
            call(Call::Send(SendCall { flags: 0, may_write: false, name: b"", ..SEND })),
            "2e00000008000000aa9988776655000000000000010000000700000000000000\
          636f6e74726f6c7061796c6f6164",
        ),
        (
            call(Call::Receive { flags: 0x42, control_room: 4096, room: ROOM }),
            "2800000009000000aa9988776655000042000000001000000000000000000000\
          0100000001000000",
        ),
        (
            call(Call::SetOption { level: 276, option: 2, value: b"value", may_write: true }),
            "250000000a000000aa9988776655000014010000020000000000000000000000\
          76616c7565",
        ),
        (
            call(Call::SetOption { level: 276, option: 2, value: b"value", may_write: false }),
            "260000000a000000aa9988776655000014010000020000000100000000000000\
          0176616c7565",
        ),
        (
            call(Call::GetOption { level: 1, option: 7, room: ROOM }),
            "280000000b000000aa9988776655000001000000070000000000000000000000\
          0100000001000000",
        ),
        (
            call(Call::Ioctl { request: 0x89e0, byte: Some(7) }),
            "210000000c000000aa99887766550000e0890000000000000000000000000000\
          07",
        ),
        (Interrupt, "200000000d000000000000000000000000000000000000000000000000000000"),
        (Wake(SOCKET), "200000000e000000aa9988776655000000000000000000000000000000000000"),
        (
            HandOver { version: 3, hand_over_version: 2, state_format: 9 },
            "200000000f000000090000000000000003000000020000000000000000000000",
        ),
        (
            call(Call::Flush(Some(Duration::from_secs(5)))),
            "2800000010000000aa9988776655000000000000000000000000000000000000\
          00f2052a01000000",
        ),
        (
            call(Call::Flush(None)),
            "2800000010000000aa9988776655000000000000000000000000000000000000\
          ffffffffffffffff",
        ),
        (call(Call::CancelAll), "2000000011000000aa9988776655000000000000000000000000000000000000"),
        (
            ShowMemory { grant: 3, nonce_at: 0x7fff_1234_5678, features: Features(0) },
            "2800000012000000030000000000000000000000000000000000000000000000\
          78563412ff7f0000",
        ),
        (
            ShowMemory { grant: 3, nonce_at: 0, features: Features::GRANTS },
            "2800000012000000030000000000000000000000020000000000000000000000\
          0000000000000000",
        ),
    ]
};

/// Replies to requests of each kind, as above. What follows their head is not theirs.
const REPLIES: [(Op, Reply, &str); 14] = [
    (
        Op::Hello,
        Reply::Welcome { node: NodeId(7), owner: LockOwner(12), features: Features(0) },
        "380000000100000007000000000000000c000000000000000000000000000000\
          7369787465656e206f66207468656d2e0100000000000000",
    ),
    (
        Op::Hello,
        Reply::Failed { errno: 93, fill: false, needed: 0 },
        "2000000001000000a3ffffffffffffff00000000000000000000000000000000",
    ),
    (
        Op::Open,
        Reply::Socket(SOCKET),
        "2000000002000000aa9988776655000000000000000000000000000000000000",
    ),
    (
        Op::Attach,
        Reply::Socket(SOCKET),
        "2000000003000000aa9988776655000000000000000000000000000000000000",
    ),
    (Op::Bind, Reply::Done, "2000000004000000000000000000000000000000000000000000000000000000"),
    (
        Op::LocalName,
        Reply::Done,
        "2400000006000400000000000000000000000000000000000000000000000000\
          6e616d65",
    ),
    (
        Op::Send,
        Reply::Sent { len: 7, fill: false },
        "2000000008000000070000000000000000000000000000000000000000000000",
    ),
    (
        Op::Send,
        Reply::Sent { len: 7, fill: true },
        "2000000008000000070000000000000000000000010000000000000000000000",
    ),
    (
        Op::Send,
        Reply::Failed { errno: 11, fill: true, needed: 0 },
        "2000000008000000f5ffffffffffffff00000000010000000000000000000000",
    ),
    (
        Op::Receive,
        Reply::Received { len: 100_000, flags: 0x28 },
        "3200000009000400a08601000000000028000000000000000700000000000000\
          6e616d65636f6e74726f6c7061796c6f6164",
    ),
    (
        Op::GetOption,
        Reply::Value { returned: 0, len: 4 },
        "240000000b000000000000000000000004000000000000000000000000000000\
          666f7572",
    ),
    (
        Op::GetOption,
        Reply::Failed { errno: 28, fill: false, needed: 400 },
        "200000000b000000e4ffffffffffffff90010000000000000000000000000000",
    ),
    (
        Op::Ioctl,
        Reply::Done,
        "210000000c000000000000000000000000000000000000000000000000000000\
          07",
    ),
    (
        Op::HandOver,
        Reply::HandOver(300),
        "200000000f0000002c0100000000000000000000000000000000000000000000",
    ),
];

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().map(|digit| digit.to_digit(16).unwrap()).collect();
    digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}

fn read(bytes: &[u8]) -> Frame<'_> {
    let (frame, len) = Frame::parse(bytes).unwrap().unwrap();
    assert_eq!(len, bytes.len());
    frame
}

#[test]
fn requests_are_the_bytes_of_before() {
    for (request, bytes) in REQUESTS {
        let bytes = hex(bytes);
        assert_eq!(request.emit(0).unwrap().parts().concat(), bytes, "{request:?}");
        assert_eq!(Request::parse(&read(&bytes)), Ok(request));
    }
}

#[test]
fn replies_are_the_bytes_of_before() {
    for (op, reply, bytes) in REPLIES {
        let bytes = hex(bytes);
        let frame = read(&bytes);
        let (name, control, payload) = (frame.name.len(), frame.control.len(), frame.payload.len());
        let head = reply.emit(op).emit(name, control, payload).unwrap();
        assert_eq!(head, bytes[..HEAD_LEN], "{reply:?}");
        assert_eq!(Reply::parse(&frame.head), Ok(reply));
    }
}

/// A message may lie in pieces, which are sent behind the request.
#[test]
fn pieces_of_a_message_count_and_follow() {
    let whole = Request::Call(SOCKET, Call::Send(SEND));
    let front = Request::Call(SOCKET, Call::Send(SendCall { payload: b"", ..SEND }));
    let bytes = [&front.emit(7).unwrap().parts().concat(), SEND.payload].concat();
    assert_eq!(Request::parse(&read(&bytes)), Ok(whole));
    assert!(front.emit(FRAME_MAX).is_none() && front.emit(usize::MAX).is_none());
    let name = [0; NAME_MAX + 1];
    assert!(Request::Call(SOCKET, Call::Bind(&name)).emit(0).is_none());
}

#[test]
fn requests_without_their_arguments_are_invalid() {
    let frame = |op, payload| Frame {
        head: Head::new(op, SOCKET.0.cast_signed()),
        name: b"",
        control: b"",
        payload,
    };
    for op in [Op::Receive, Op::GetOption, Op::Flush] {
        let invalid = Err(Invalid { socket: Some(SOCKET) });
        assert_eq!(Request::parse(&frame(op, &[0; 7])), invalid, "{op:?}");
        assert!(Request::parse(&frame(op, &[0; 9])).is_ok(), "{op:?}");
    }
    for len in [0, 7, 9] {
        let invalid = Err(Invalid { socket: None });
        assert_eq!(Request::parse(&frame(Op::Memory, &[0; 9][..len])), invalid, "{len}");
    }
    assert_eq!(Request::parse(&frame(Op::Watch, b"")), Ok(Request::ShowWatch));
    let emitted = Request::ShowWatch.emit(0).unwrap();
    assert_eq!(emitted.parts()[0], Head::new(Op::Watch, 0).emit(0, 0, 0).unwrap());
    let ioctl = Call::Ioctl { request: 0, byte: None };
    assert_eq!(Request::parse(&frame(Op::Ioctl, b"")), Ok(Request::Call(SOCKET, ioctl)));
}

#[test]
fn numbers_that_no_node_sends_are_seen() {
    let parse = |op, value| Reply::parse(&Head::new(op, value));
    assert_eq!(parse(Op::Hello, 7), Err(Malformed), "no channel");
    assert_eq!(parse(Op::Wake, 0), Err(Malformed));
    assert_eq!(parse(Op::Interrupt, 0), Err(Malformed));
    for value in [i64::MIN, -4096] {
        assert_eq!(parse(Op::Bind, value), Ok(Reply::error(71)), "{value}");
    }
    assert_eq!(parse(Op::Bind, -4095), Ok(Reply::error(4095)));
    // What is to be done about a socket is said of sends only, and a length of options.
    let head = Head { op: Op::Receive, value: -11, a: 400, b: 1 };
    assert_eq!(Reply::parse(&head), Ok(Reply::error(11)));
}

/// A side of before writes zeroes there, and reads nothing.
#[test]
fn features_stand_where_nothing_was() {
    let plain = Request::Hello { version: 3, features: Features(0) }.emit(0).unwrap();
    let other = Request::Hello { version: 3, features: Features(u32::MAX) }.emit(0).unwrap();
    let (plain, mut other) = (plain.parts().concat(), other.parts().concat());
    assert_eq!(other[20..24], [0xff; 4]);
    other[20..24].fill(0);
    assert_eq!(plain, other);
}

/// Whatever the numbers and the parts, what is read is written as it was meant.
#[test]
fn noise_is_read_as_it_is_written() {
    let mut state = 0x1234_5678_9abc_def0_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let (mut requests, mut replies) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = [0_u8; 64];
        bytes.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = random().to_ne_bytes());
        let len = HEAD_LEN + random() as usize % 33;
        // Mostly a length that is right, and parts that fit.
        bytes[..4].copy_from_slice(&(len as u32).to_ne_bytes());
        bytes[4] %= 20;
        bytes[6..8].copy_from_slice(&(random() as u16 % 8).to_ne_bytes());
        bytes[24..28].copy_from_slice(&(random() as u32 % 8).to_ne_bytes());
        let Ok(Some((frame, _))) = Frame::parse(&bytes[..len]) else { continue };
        if let Ok(request) = Request::parse(&frame) {
            requests += 1;
            let again = request.emit(0).unwrap().parts().concat();
            assert_eq!(Request::parse(&read(&again)), Ok(request));
        }
        if let Ok(reply) = Reply::parse(&frame.head) {
            replies += 1;
            assert_eq!(Reply::parse(&reply.emit(frame.head.op)), Ok(reply));
        }
    }
    assert!(requests > 1000 && replies > 1000, "{requests} {replies}");
}
