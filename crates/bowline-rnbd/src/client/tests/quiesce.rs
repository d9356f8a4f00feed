//! Opening a device again while other disks are in use [NB-16].

use super::*;

/// Three disks: `z` was closed by the server, `y` has a slow read in flight, and `x` is in use and
/// must not suffer from either.
fn three(config: Config) -> (Rig, [DevId; 3]) {
    let mut rig = Rig::new(config, 8);
    let disks = [("x", 0), ("y", 1), ("z", 2)].map(|(name, id)| rig.mapped(name, id, &DISK));
    rig.io(disks[2], IoOp::Read, 0, 512, 1);
    rig.answer(-107);
    assert_eq!(rig.events(), [Event::Offline { dev: disks[2] }]);
    rig.io(disks[1], IoOp::Read, 0, 512, 2);
    (rig, disks)
}

/// Reads of `x` that are sent and answered in that many milliseconds.
fn reads(rig: &mut Rig, x: DevId, ms: u64) -> usize {
    let mut count = 0;
    for _ in 0..ms / 100 {
        rig.io(x, IoOp::Read, 0, 512, 3);
        rig.pass(100);
        while rig.sends.len() > 1 {
            let io = rig.sends.remove(1);
            rig.core.io_answer(rig.now, io.slot, 0);
            rig.pump();
            count += 1;
        }
    }
    count
}

#[test]
fn a_request_that_hangs_quiesces_other_disks_briefly() {
    // tests [NB-16] [NB-54]
    let (mut rig, [x, _, z]) = three(queueing());
    assert_eq!(reads(&mut rig, x, 1000), 10);
    assert_eq!(reads(&mut rig, x, 1900), 0, "they wait for the quiesced open");
    assert!(reads(&mut rig, x, 200) >= 20, "no longer than two seconds");
    assert_eq!(reads(&mut rig, x, 26_800), 268, "and not again");
    assert!(!rig.done().contains(&(1, -5)));
    assert_eq!(reads(&mut rig, x, 574_000), 5740);
    assert!(rig.done().contains(&(1, -5)), "its time was up");
    assert!(
        rig.core.poll_service_message().is_none(),
        "IO with an old id may still reach the server"
    );
    // `z` is opened soon after the read that hangs has ended.
    rig.answer(0);
    rig.open("z", 4, &DISK);
    assert_eq!(rig.events(), [Event::Online { dev: z }]);
    rig.io(x, IoOp::Read, 0, 512, 4);
    assert_eq!(rig.sends.len(), 1);
}

#[test]
fn quiesces_take_the_smaller_part_of_the_time() {
    // tests [NB-16]
    let (mut rig, [x, y, _]) = three(queueing());
    let mut idle = 0;
    // Storage takes a second and a half for each read of `y`, and the export of `z` does not come
    // back.
    for _ in 0..40 {
        idle += (0..15).filter(|_| reads(&mut rig, x, 100) == 0).count();
        rig.io(y, IoOp::Read, 0, 512, 2);
        rig.answer(0);
        while let Some(order) = rig.core.poll_service_message() {
            rig.core.service_answer(rig.now, order.token, -2, &[]);
            rig.pump();
        }
    }
    assert!((20..=110).contains(&idle), "{idle} of 600");
}

#[test]
fn an_open_that_hangs_quiesces_other_disks_briefly() {
    // tests [NB-16]
    let mut rig = Rig::new(queueing(), 8);
    let [x, z] = [("x", 0), ("z", 2)].map(|(name, id)| rig.mapped(name, id, &DISK));
    rig.io(z, IoOp::Read, 0, 512, 1);
    rig.answer(-107);
    rig.pass(1000);
    let open = rig.order();
    rig.io(x, IoOp::Read, 0, 512, 2);
    rig.pass(1999);
    assert!(rig.sends.is_empty());
    rig.pass(1);
    rig.answer(0);
    assert_eq!(rig.done(), [(2, 0)]);
    rig.answer_open(open.token, 7, &DISK);
    rig.pump();
    rig.answer(0);
    assert_eq!(rig.done(), [(1, 0)]);
}

#[test]
fn a_remap_beside_a_request_that_hangs_ends() {
    // tests [NB-37] [NB-16]
    for config in [Config::default(), queueing()] {
        let (mut rig, [x, _, z]) = three(config);
        rig.core.remap(rig.now, z).unwrap();
        assert_eq!(rig.core.remap(rig.now, z), Err(Errno::EBUSY), "there is one answer");
        rig.pass(1999);
        assert_eq!(rig.events(), []);
        rig.pass(1);
        assert_eq!(rig.events(), [Event::Remapped { dev: z, result: Err(Errno::EBUSY) }]);
        assert_eq!(rig.core.remap(rig.now, z), Err(Errno::EBUSY), "others had just to wait");
        assert_eq!(reads(&mut rig, x, 60_000), 600);
        rig.answer(0);
        rig.pass(1000);
        let result = rig.core.remap(rig.now, z);
        assert_eq!(result.is_err(), config.outage == WAIT, "under way by itself: {result:?}");
        rig.open("z", 9, &DISK);
        assert_eq!(rig.events()[0], Event::Online { dev: z });
    }
}

#[test]
fn a_remap_ends_with_the_device_and_with_the_session() {
    // tests [NB-37]: before its OPEN is sent, and while that is under way
    for sent in [false, true] {
        let ended = |end: fn(&mut Rig, DevId)| {
            let (mut rig, [.., z]) = three(Config::default());
            if sent {
                rig.answer(0);
            }
            rig.core.remap(rig.now, z).unwrap();
            let open = rig.core.poll_service_message();
            assert_eq!(open.is_some(), sent);
            end(&mut rig, z);
            rig.core.check_invariants();
            if let Some(open) = open {
                rig.core.service_answer(rig.now, open.token, -103, &[]);
            }
            let mut events = rig.events();
            events.retain(|event| matches!(event, Event::Remapped { .. }));
            assert_eq!(events.len(), 1, "{events:?}");
            (z, events[0])
        };
        let (dev, event) = ended(|rig, z| rig.core.unmap(z).unwrap());
        assert_eq!(event, Event::Remapped { dev, result: Err(Errno::ENODEV) });
        let (dev, event) = ended(|rig, _| rig.core.link_down(rig.now));
        assert_eq!(event, Event::Remapped { dev, result: Err(Errno::ECONNABORTED) });
    }
}

#[test]
fn a_device_that_is_unmapped_quiesces_no_other() {
    // tests [NB-37] [NB-16]
    let (mut rig, [x, _, z]) = three(queueing());
    rig.pass(1000);
    rig.io(x, IoOp::Read, 0, 512, 3);
    assert_eq!(rig.sends.len(), 1);
    rig.core.unmap(z).unwrap();
    rig.pump();
    assert_eq!(rig.sends.len(), 2);
}
