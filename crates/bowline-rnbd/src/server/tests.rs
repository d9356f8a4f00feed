use bowline_wire::rnbd::{Io, IoFlags, OpenRsp};

use super::*;

const S1: SessKey = SessKey(1);
const S2: SessKey = SessKey(2);
/// Id of the first device that is opened.
const FIRST: u32 = u32::MAX - 1;
const DISK: Limits = Limits { write_cache: true, fua: true, ..Limits::plain(1 << 20) };

fn core() -> Core {
    let mut core = Core::new(CoreLimits::default(), FIRST);
    core.link_up(S1, "s1");
    core.link_up(S2, "s2");
    core
}

/// Sends an OPEN and plays the caller; `Ok` is the device id.
fn open(
    core: &mut Core,
    key: SessKey,
    name: &[u8],
    access: Access,
    export: u32,
) -> Result<u32, i32> {
    let usr = wire::emit_open(access, name).unwrap();
    let act = core.message(key, Dir::Read, 56, 56, &usr);
    let (errno, data) = match act {
        Act::Open { ticket, name: asked, access: mode } => {
            assert_eq!((asked.as_slice(), mode), (name, access));
            core.opened(ticket, Ok((ExportId(export), DISK)));
            let answer = core.poll_answer().unwrap();
            assert_eq!(answer.ticket, ticket);
            (answer.errno, answer.data)
        }
        Act::Reply { errno, data } => (errno, data),
        other => panic!("{other:?}"),
    };
    core.check_invariants();
    match data {
        Reply::Open(bytes) if errno == 0 => Ok(OpenRsp::parse(&bytes).unwrap().device_id),
        Reply::None if errno < 0 => Err(errno),
        other => panic!("{errno} {other:?}"),
    }
}

fn read(core: &mut Core, key: SessKey, device: u32) -> Act {
    let io =
        Io { device, sector: 0, op: wire::OP_READ, flags: IoFlags::SYNC, len: 512, prio: 0x4004 };
    core.message(key, Dir::Read, 512, 512, &io.emit())
}

fn close(core: &mut Core, key: SessKey, id: u32) -> Act {
    core.message(key, Dir::Write, 0, 0, &wire::emit_close(id))
}

fn errno(act: &Act) -> i32 {
    match act {
        Act::Reply { errno, data: Reply::None } => *errno,
        other => panic!("{other:?}"),
    }
}

#[test]
fn versions_are_the_lower_of_both_and_priorities_need_two() {
    // tests [NB-14] [NB-11]
    let mut core = core();
    let id = open(&mut core, S1, b"a", Access::Ro, 1).unwrap();
    let prio = |core: &mut Core| match read(core, S1, id) {
        Act::Io { io, .. } => io.prio,
        other => panic!("{other:?}"),
    };
    assert_eq!(prio(&mut core), 0, "no SESS_INFO yet, and yet it works");
    for (asked, answered) in [(1, 1), (2, 2), (77, 2)] {
        let act = core.message(S1, Dir::Read, 36, 36, &wire::emit_sess_info(asked));
        let wanted = Reply::SessInfo(wire::emit_sess_info_rsp(answered));
        assert_eq!(act, Act::Reply { errno: 0, data: wanted });
    }
    assert_eq!(prio(&mut core), 0x4004);
}

#[test]
fn an_open_is_answered_again_with_the_same_id_whatever_the_mode() {
    // tests [NB-17] [NB-9]
    let mut core = core();
    assert_eq!(open(&mut core, S1, b"a", Access::Ro, 1), Ok(FIRST));
    assert_eq!(open(&mut core, S1, b"a", Access::Rw, 1), Ok(FIRST));
    assert_eq!(open(&mut core, S1, b"b", Access::Rw, 2), Ok(FIRST + 1));
    assert_eq!(core.opens()[0].access, Access::Ro, "the first mode stays");
    assert_eq!(open(&mut core, S1, b"x/..y", Access::Ro, 3), Err(-22));
}

#[test]
fn access_is_arbitrated_over_sessions_by_backing_device() {
    // tests [NB-19] [NB-17]
    let mut core = core();
    for key in [SessKey(3), SessKey(4)] {
        core.link_up(key, "more");
    }
    assert!(open(&mut core, S1, b"a", Access::Rw, 1).is_ok());
    assert_eq!(open(&mut core, S2, b"alias", Access::Rw, 1), Err(-1));
    assert_eq!(core.poll_release(), Some(ExportId(1)), "what was refused is let go");
    assert!(open(&mut core, S2, b"a", Access::Migration, 1).is_ok());
    assert_eq!(open(&mut core, SessKey(3), b"a", Access::Migration, 1), Err(-1));
    assert!(open(&mut core, SessKey(3), b"a", Access::Ro, 1).is_ok());
    assert_eq!(core.poll_release(), Some(ExportId(1)));
    core.link_down(S1);
    assert_eq!(core.poll_release(), Some(ExportId(1)));
    assert!(open(&mut core, SessKey(4), b"a", Access::Migration, 1).is_ok());
    let bad = core.message(S2, Dir::Read, 56, 56, &{
        let mut usr = wire::emit_open(Access::Ro, b"q").unwrap();
        usr[4] = 3;
        usr
    });
    assert_eq!(errno(&bad), -22);
}

#[test]
fn two_spellings_of_one_device_in_a_session_are_refused_at_once() {
    // tests [NB-58]
    let mut core = core();
    assert!(open(&mut core, S1, b"/dev/loop0", Access::Rw, 1).is_ok());
    assert_eq!(open(&mut core, S1, b"dev/loop0", Access::Migration, 1), Err(-17));
    core.check_invariants();
    let other = open(&mut core, S2, b"dev/loop0", Access::Migration, 1);
    assert!(other.is_ok(), "count unchanged");
}

#[test]
fn an_error_of_opening_is_the_answer_and_read_only_storage_takes_no_writer() {
    // tests [NB-17]
    let mut core = core();
    let usr = wire::emit_open(Access::Rw, b"a").unwrap();
    let Act::Open { ticket, .. } = core.message(S1, Dir::Read, 56, 56, &usr) else { panic!() };
    core.opened(ticket, Err(Errno::ENOENT));
    assert_eq!(core.poll_answer().unwrap().errno, -2);
    let Act::Open { ticket, .. } = core.message(S1, Dir::Read, 56, 56, &usr) else { panic!() };
    core.opened(ticket, Ok((ExportId(1), Limits { read_only: true, ..DISK })));
    assert_eq!(core.poll_answer().unwrap().errno, -13);
    assert_eq!(core.poll_release(), Some(ExportId(1)));
    assert!(core.opens().is_empty());
}

#[test]
fn an_open_repeated_while_it_runs_shares_its_answer() {
    // tests [NB-17]: failover repeats messages
    let mut core = core();
    let usr = wire::emit_open(Access::Rw, b"a").unwrap();
    let Act::Open { ticket, .. } = core.message(S1, Dir::Read, 56, 56, &usr) else { panic!() };
    let Act::Later { ticket: second } = core.message(S1, Dir::Read, 56, 56, &usr) else { panic!() };
    core.opened(ticket, Ok((ExportId(1), DISK)));
    let answers = [core.poll_answer().unwrap(), core.poll_answer().unwrap()];
    assert_eq!(answers.map(|a| a.ticket), [ticket, second]);
    assert_eq!(answers[0].data, answers[1].data);
    assert_eq!(core.opens().len(), 1);
}

#[test]
fn close_waits_for_io_of_its_device() {
    // tests [NB-20]
    let mut core = core();
    let id = open(&mut core, S1, b"a", Access::Rw, 1).unwrap();
    assert_eq!(errno(&close(&mut core, S1, 99)), 0, "an unknown id is no error");
    let Act::Io { io, export } = read(&mut core, S1, id) else { panic!() };
    assert_eq!(export, ExportId(1));
    let Act::Later { ticket } = close(&mut core, S1, id) else { panic!() };
    assert_eq!(errno(&read(&mut core, S1, id)), -107, "no more IO");
    core.check_invariants();
    assert_eq!(core.poll_answer(), None);
    core.io_done(io.open);
    let answer = Answer { ticket, errno: 0, data: Reply::None };
    assert_eq!(core.poll_answer(), Some(answer));
    assert_eq!(core.poll_release(), Some(ExportId(1)));
    core.io_done(io.open);
    core.check_invariants();
    assert_eq!(errno(&close(&mut core, S1, id)), 0, "again");
}

#[test]
fn no_id_is_given_out_twice() {
    // tests [NB-9]: IO that comes late, or was meant for a server before, must not hit another disk
    let mut core = core();
    let mut seen = Vec::new();
    for round in 0..5 {
        for (key, export) in [(S1, 1), (S2, 2)] {
            let id = open(&mut core, key, b"a", Access::Rw, export).unwrap();
            assert!(!seen.contains(&id), "{id} in round {round}");
            seen.push(id);
            assert_eq!(errno(&close(&mut core, key, id)), 0);
            for &old in &seen {
                assert_eq!(errno(&read(&mut core, key, old)), -107);
            }
        }
        core.link_down(S1);
        core.link_up(S1, "s1");
    }
    assert_eq!((seen[0], seen[2]), (FIRST, 0), "around the end of all ids");
}

#[test]
fn an_id_in_use_is_left_out_when_ids_begin_again() {
    // tests [NB-9]
    let mut core = core();
    let first = open(&mut core, S1, b"a", Access::Rw, 1).unwrap();
    core.next_id = first;
    assert_eq!(open(&mut core, S1, b"b", Access::Rw, 2), Ok(first + 1));
}

#[test]
fn a_forced_close_waits_for_io_of_its_device() {
    // tests [NB-21] [NB-23]
    let mut core = core();
    let id = open(&mut core, S1, b"a", Access::Rw, 1).unwrap();
    let open_id = core.opens()[0].id;
    let Act::Io { io, .. } = read(&mut core, S1, id) else { panic!() };
    core.force_close(open_id).unwrap();
    assert_eq!(core.force_close(open_id), Err(Errno::ENODEV));
    assert_eq!(errno(&read(&mut core, S1, id)), -107);
    assert_eq!(core.poll_release(), None, "IO is still running");
    core.io_done(io.open);
    assert_eq!(core.poll_release(), Some(ExportId(1)));
    assert_ne!(open(&mut core, S1, b"a", Access::Rw, 1), Ok(id));
    assert_eq!(errno(&close(&mut core, S1, id)), 0, "the client lets go of it");
    assert_eq!(core.opens().len(), 1);
}

#[test]
fn malformed_messages_get_einval_before_any_field_is_read() {
    // tests [NB-22]
    let mut core = core();
    let id = open(&mut core, S1, b"a", Access::Rw, 1).unwrap();
    let mut nul_less = wire::emit_open(Access::Ro, b"a").unwrap();
    nul_less[6..261].fill(b'x');
    let io =
        Io { device: id, sector: 0, op: wire::OP_FLUSH, flags: IoFlags::SYNC, len: 0, prio: 0 };
    let cases: [&[u8]; 8] = [
        &[],
        &[0; 3],
        &[0; 4],
        &[2, 0, 0, 0, 0, 0],
        &nul_less,
        &wire::emit_close(id)[..7],
        &io.emit()[..23],
        &[99; 64],
    ];
    for usr in cases {
        assert_eq!(errno(&core.message(S1, Dir::Read, 56, 56, usr)), -22, "{usr:?}");
    }
    let short = core.message(S1, Dir::Read, 512, 0, &io.emit()[..24]);
    assert!(matches!(short, Act::Io { .. }), "an IO of protocol version 1: {short:?}");
    assert_eq!(errno(&core.message(S1, Dir::Read, 35, 35, &wire::emit_sess_info(2))), -22);
    let usr = wire::emit_open(Access::Ro, b"b").unwrap();
    assert_eq!(errno(&core.message(S1, Dir::Read, 55, 55, &usr)), -22);
    assert_eq!(errno(&core.message(S1, Dir::Write, 0, 56, &usr)), -22, "nothing goes back");
    assert_eq!(errno(&core.message(SessKey(9), Dir::Read, 56, 56, &usr)), -19);
}

#[test]
fn a_session_that_ends_releases_all_it_had_open() {
    // tests [NB-15]
    let mut core = core();
    let id = open(&mut core, S1, b"a", Access::Rw, 1).unwrap();
    open(&mut core, S1, b"b", Access::Ro, 2).unwrap();
    let Act::Io { io, .. } = read(&mut core, S1, id) else { panic!() };
    let usr = wire::emit_open(Access::Rw, b"c").unwrap();
    let Act::Open { ticket, .. } = core.message(S1, Dir::Read, 56, 56, &usr) else { panic!() };
    core.link_down(S1);
    core.io_done(io.open);
    assert_eq!(core.poll_answer().map(|answer| (answer.ticket, answer.errno)), Some((ticket, -19)));
    core.opened(ticket, Ok((ExportId(3), DISK)));
    let released: Vec<_> = std::iter::from_fn(|| core.poll_release()).collect();
    assert_eq!(released, [ExportId(1), ExportId(2), ExportId(3)]);
    core.check_invariants();
    assert!(open(&mut core, S2, b"a", Access::Rw, 1).is_ok(), "and nobody else waits for it");
}

#[test]
fn devices_of_a_session_are_capped() {
    // tests [NB-50]
    let mut core = Core::new(CoreLimits { devices_per_session: 2 }, 0);
    core.link_up(S1, "s1");
    for (n, name) in [b"a", b"b"].into_iter().enumerate() {
        let n = u32::try_from(n).unwrap();
        assert_eq!(open(&mut core, S1, name, Access::Ro, n), Ok(n));
    }
    assert_eq!(open(&mut core, S1, b"c", Access::Ro, 7), Err(-12));
    assert_eq!(core.poll_release(), Some(ExportId(7)));
}

#[test]
fn io_is_checked_against_the_new_size_of_storage() {
    let mut core = core();
    let id = open(&mut core, S1, b"a", Access::Ro, 1).unwrap();
    core.set_limits(ExportId(1), Limits { bytes: 0, ..DISK });
    assert_eq!(errno(&read(&mut core, S1, id)), -5);
}

#[test]
fn what_clients_do_is_told_in_order_and_bounded() {
    // tests [NB-15] [NB-19] [NB-20]
    use ClientChange::{Closed, Connected, Disconnected, Opened, Refused};
    let mut core = core();
    let id = open(&mut core, S1, b"a", Access::Rw, 1).unwrap();
    assert_eq!(open(&mut core, S2, b"alias", Access::Rw, 1), Err(-1));
    assert_eq!(errno(&close(&mut core, S1, id)), 0);
    assert!(open(&mut core, S2, b"a", Access::Ro, 1).is_ok());
    core.link_down(S2);
    let (events, missed) = core.take_events();
    let told: Vec<_> = events.iter().map(|ev| (ev.session_name.as_str(), &ev.change)).collect();
    let wanted = [
        ("s1", &Connected),
        ("s2", &Connected),
        ("s1", &Opened(b"a".to_vec(), Access::Rw)),
        ("s2", &Refused(b"alias".to_vec(), Access::Rw, Errno::EPERM)),
        ("s1", &Closed(b"a".to_vec())),
        ("s2", &Opened(b"a".to_vec(), Access::Ro)),
        ("s2", &Closed(b"a".to_vec())),
        ("s2", &Disconnected),
    ];
    assert_eq!((told, missed), (wanted.to_vec(), 0));
    // A client that comes and goes while nobody looks takes no more room.
    for _ in 0..200 {
        core.link_up(S2, "s2");
        core.link_down(S2);
    }
    let (events, missed) = core.take_events();
    assert_eq!((events.len() as u64 + missed, events.len()), (400, 256));
    assert_eq!(events.last().map(|event| &event.change), Some(&Disconnected));
    assert_eq!(core.take_events(), (Vec::new(), 0));
}
