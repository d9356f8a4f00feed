//! Requests and answers.

use std::time::Duration;

use bowline_rtrs::client::{ClientConfig, Event, PermitKind, StatsFile};
use bowline_rtrs::{Errno, MemRef, Policy, PortAttr};
use bowline_verbs::Access;
use bowline_wire::rtrs::{Desc, Dir, Imm, IoHdr};

use crate::peer::{ATTR, CHUNK, Rig, Written, addr, config};

// tests [RT-38], [RT-39], [RT-40], [RT-11]
#[test]
fn a_write_is_data_then_message_then_header() {
    for refresh in [false, true] {
        let mut rig = Rig::opened(refresh, 1);
        let memory = rig.memory();
        rig.buffers[&memory].write(100, b"hello ");
        rig.buffers[&memory].write(300, b"world");
        let permit = rig.permit();
        let piece = |offset, len| MemRef { region: memory, offset, len };
        let data = [piece(100, 6), piece(0, 0), piece(300, 5)];
        rig.session.request(rig.now, Dir::Write, &permit, b"usr", &data, 9).unwrap();
        rig.pump();
        let io = rig.ios[0].clone();
        assert_eq!((io.conn.cid, io.id, io.addr), (1, 0, 0));
        assert_eq!(io.bytes, b"hello worldusr\x02\x00\x03\x00");
        assert_eq!((io.req.data_len, io.usr()), (11, &b"usr"[..]));
        assert_eq!(rig.take_completed(), []);
        rig.reply(&io, 0);
        rig.pump();
        assert_eq!(rig.take_completed(), [(9, 0)]);
    }
}

// tests [RT-97], [RT-39]: the contents of the chunk when the immediate arrives are the same either
// way.
#[test]
fn data_goes_before_its_header_where_both_do_not_fit_a_packet_and_the_device_likes_that() {
    for (likes, len, early) in [
        (true, 4096, true),
        (true, 8192, true),
        (true, 2048, false),
        // With 3 bytes of message and 4 of header.
        (true, 4089, false),
        (true, 4090, true),
        (true, 12_800, true),
        (false, 4096, false),
        (false, 12_800, false),
    ] {
        let attr = PortAttr { burst: if likes { 15 * 4096 } else { 0 }, ..ATTR };
        let mut rig = Rig::of_device(config(), true, attr, 3);
        rig.session.open(rig.now, &[addr(1)]);
        rig.pump();
        let memory = rig.memory();
        let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        rig.buffers[&memory].write(0, &bytes);
        let permit = rig.permit();
        let data = [MemRef { region: memory, offset: 0, len }];
        rig.session.request(rig.now, Dir::Write, &permit, b"usr", &data, 1).unwrap();
        rig.pump();
        let io = rig.ios[0].clone();
        let chunk = u64::from(io.id) * u64::from(CHUNK);
        let whole = if early {
            assert_eq!(rig.early, [(chunk, bytes.clone())]);
            assert_eq!(io.addr, u64::from(len));
            [rig.early[0].1.clone(), io.bytes.clone()].concat()
        } else {
            assert_eq!((rig.early.len(), io.addr), (0, 0));
            io.bytes.clone()
        };
        assert_eq!(whole, [&bytes[..], b"usr\x02\x00\x03\x00"].concat());
        assert_eq!(io.req.data_len, len);
        rig.reply_all();
        assert_eq!(rig.take_completed(), [(1, 0)]);
    }
}

// tests [RT-12], [RT-39], [RT-41], [RT-42], [RT-43]
#[test]
fn a_read_tells_where_the_answer_goes() {
    let mut rig = Rig::opened(true, 1);
    let memory = rig.memory();
    let permit = rig.permit();
    let data = [MemRef { region: memory, offset: 4096, len: 8192 }];
    rig.session.request(rig.now, Dir::Read, &permit, b"get", &data, 1).unwrap();
    rig.pump();
    let io = rig.ios[0].clone();
    assert_eq!((io.addr, io.usr()), (8192, &b"get"[..]));
    let desc = Desc { addr: 4096, key: (memory.0 + 1) << 8, len: 8192 };
    let hdr = IoHdr::Read { usr_len: 3, need_inval: false, desc: Some(desc) };
    assert_eq!(io.req.hdr, hdr);
    rig.reply_all();
    // Without data there is no descriptor.
    rig.session.request(rig.now, Dir::Read, &permit, b"flush", &[], 2).unwrap();
    rig.pump();
    let hdr = IoHdr::Read { usr_len: 5, need_inval: false, desc: None };
    assert_eq!((rig.ios[0].req.hdr, rig.ios[0].addr), (hdr, 0));
    rig.reply_all();
    assert_eq!(rig.take_completed(), [(1, 0), (2, 0)]);
}

// tests [RT-13], [RT-56], [RT-51], [RT-99]: the peer checks the key of every request.
#[test]
fn each_use_of_a_chunk_has_the_key_of_the_last_answer() {
    for counted in [false, true] {
        let mut rig = Rig::new(config(), true);
        rig.counted = counted;
        assert_eq!(rig.open(1), Ok(()));
        let memory = rig.memory();
        let permit = rig.permit();
        for tag in 0..600 {
            rig.write(&permit, memory, tag).unwrap();
            assert_eq!(rig.ios[0].key, 0x300 | (tag as u32 & 0xff));
            rig.reply_all();
        }
        assert_eq!(rig.completed.len(), 600);
    }
}

// tests [RT-99]
#[test]
fn keys_are_not_counted_by_who_has_not_said_so() {
    let mut rig = Rig::new(ClientConfig { counts_keys: false, ..config() }, true);
    rig.counted = true;
    assert_eq!(rig.open(1), Err(Errno::ECONNRESET));
    rig.assert_empty();
}

// tests [RT-17]
#[test]
fn the_errno_of_an_answer_reaches_the_program() {
    for refresh in [false, true] {
        let mut rig = Rig::opened(refresh, 1);
        let permit = rig.permit();
        rig.session.request(rig.now, Dir::Write, &permit, b"u", &[], 3).unwrap();
        rig.pump();
        let io = rig.ios[0].clone();
        rig.reply(&io, 28);
        rig.pump();
        assert_eq!(rig.take_completed(), [(3, -28)]);
    }
}

// tests [RT-40], [RT-59]
#[test]
fn what_does_not_fit_is_refused() {
    let mut rig = Rig::opened(true, 1);
    let memory = rig.memory();
    let permit = rig.permit();
    let piece = |len| [MemRef { region: memory, offset: 0, len }];
    let mut ask = |dir, usr: &[u8], data: &[MemRef]| {
        let result = rig.session.request(rig.now, dir, &permit, usr, data, 0);
        rig.pump();
        rig.reply_all();
        result
    };
    let most = CHUNK - 4096;
    assert_eq!(ask(Dir::Write, &[0; 32], &piece(most)), Ok(()));
    assert_eq!(ask(Dir::Write, &[0; 32], &piece(most + 1)), Err(Errno::EMSGSIZE));
    assert_eq!(ask(Dir::Read, &[0; 32], &piece(most)), Ok(()));
    assert_eq!(ask(Dir::Read, &[0; 32], &piece(most + 1)), Err(Errno::EMSGSIZE));
    assert_eq!(ask(Dir::Write, &[0; 500], &[]), Ok(()));
    assert_eq!(ask(Dir::Write, &[0; 600], &[]), Err(Errno::EMSGSIZE));
    let two = [piece(10)[0], piece(20)[0]];
    assert_eq!(ask(Dir::Write, &[], &two), Ok(()));
    assert_eq!(ask(Dir::Read, &[], &two), Ok(()), "the device makes a key for it");
    let many: Vec<_> = (0..129).map(|n| MemRef { offset: n * 64, ..piece(8)[0] }).collect();
    assert_eq!(ask(Dir::Read, &[], &many), Err(Errno::EINVAL));
    assert_eq!(ask(Dir::Read, &[], &many[1..]), Ok(()));
    assert_eq!(ask(Dir::Write, &[], &[two[0]; 8]), Err(Errno::EINVAL), "gather list");
    let outside = [MemRef { region: memory, offset: (1 << 20) - 5, len: 6 }];
    assert_eq!(ask(Dir::Write, &[], &outside), Err(Errno::EINVAL));
    let nowhere = [MemRef { offset: u64::MAX, ..piece(6)[0] }];
    assert_eq!(ask(Dir::Write, &[], &nowhere), Err(Errno::EINVAL));
    let mut unknown = piece(6);
    unknown[0].region.0 += 77;
    assert_eq!(ask(Dir::Write, &[], &unknown), Err(Errno::EINVAL));
}

// tests [RT-27], [RT-69]: the server gets no key of memory it must not write.
#[test]
fn a_read_needs_memory_the_server_may_write() {
    let mut rig = Rig::opened(true, 1);
    let source = rig.region(4096, Access::empty());
    let permit = rig.permit();
    let data = [MemRef { region: source, offset: 0, len: 512 }];
    let read = rig.session.request(rig.now, Dir::Read, &permit, b"", &data, 1);
    assert_eq!(read, Err(Errno::EINVAL));
    rig.session.request(rig.now, Dir::Write, &permit, b"", &data, 1).unwrap();
    rig.pump();
    // Memory in use stays until the request has ended.
    rig.session.drop_region(source);
    rig.pump();
    assert!(rig.buffers.contains_key(&source));
    let other = rig.permit();
    assert_eq!(rig.write(&other, source, 2), Err(Errno::EINVAL));
    rig.reply_all();
    // Answered, but perhaps not acknowledged: the data may have to be sent again from this memory.
    assert!(rig.buffers.contains_key(&source));
    let unknown = rig.session.region_outcome(source);
    assert_eq!(unknown, Some(Ok(())), "its number is not used again yet");
    let kept = rig.region(4096, Access::LOCAL_WRITE);
    assert_eq!(rig.write(&other, kept, 3), Ok(()));
    rig.pump();
    rig.reply_all();
    assert!(!rig.buffers.contains_key(&source), "the next send told of the end of those before");
}

// tests [RS-26]
#[test]
fn a_permit_has_one_request_at_a_time() {
    let mut rig = Rig::opened(true, 1);
    let Written { permit, memory } = rig.write_one(1);
    assert_eq!(rig.write(&permit, memory, 2), Err(Errno::EBUSY));
    // Put back too early: the permit is free when the request has ended.
    rig.session.put_permit(permit);
    let next = rig.permit();
    assert_eq!(next.index(), 1);
    rig.reply_all();
    assert_eq!(rig.permit().index(), 0);
    // A permit of another session is refused.
    let mut other = Rig::of_device(config(), false, ATTR, 0x78);
    other.session.open(other.now, &[addr(3)]);
    other.pump();
    let foreign = other.permit();
    let asked = rig.session.request(rig.now, Dir::Write, &foreign, b"", &[], 1);
    assert_eq!(asked, Err(Errno::EINVAL));
    rig.session.put_permit(foreign);
    assert_eq!(rig.permit().index(), 2);
}

// tests [RT-37]
#[test]
fn the_last_permit_is_for_service() {
    let mut rig = Rig::opened(true, 1);
    let permits: Vec<_> =
        std::iter::from_fn(|| rig.session.get_permit(PermitKind::Io, 0)).collect();
    assert_eq!(permits.len(), 63);
    let service = rig.session.get_permit(PermitKind::Service, 0).unwrap();
    rig.session.request(rig.now, Dir::Write, &service, b"open", &[], 5).unwrap();
    rig.pump();
    assert_eq!(rig.ios[0].conn.cid, 0);
    rig.session.put_permit(service);
    assert_eq!(rig.session.get_permit(PermitKind::Service, 0), None);
    rig.reply_all();
    let free =
        |rig: &mut Rig| rig.take_events().iter().filter(|e| **e == Event::PermitFree).count();
    assert_eq!(free(&mut rig), 1, "for messages");
    assert_eq!(rig.session.get_permit(PermitKind::Io, 0), None, "not for IO");
    let service = rig.session.get_permit(PermitKind::Service, 0).unwrap();
    rig.session.put_permit(service);
    rig.pump();
    assert_eq!(free(&mut rig), 0, "not for IO");
    permits.into_iter().for_each(|permit| rig.session.put_permit(permit));
    rig.pump();
    assert_eq!(free(&mut rig), 1);
}

// tests [RT-37], [RT-24]
#[test]
fn the_processor_chooses_the_connection() {
    for io_connections in [0, 1, 3] {
        let mut settings = config();
        settings.io_connections = io_connections;
        let mut rig = Rig::opened_with(settings, false, 1);
        for cpu in 0..8 {
            let permit = rig.session.get_permit(PermitKind::Io, cpu).unwrap();
            rig.session.request(rig.now, Dir::Write, &permit, b"", &[], 0).unwrap();
            rig.pump();
            let expected = if io_connections == 0 { 0 } else { cpu % io_connections + 1 };
            assert_eq!(rig.ios[0].conn.cid, expected);
            rig.session.put_permit(permit);
            rig.reply_all();
        }
    }
}

// tests [RT-52], [RT-55]: receives and send queue entries never run out, in both modes.
#[test]
fn queues_are_never_used_up() {
    for refresh in [false, true] {
        let mut rig = Rig::opened(refresh, 1);
        let memory = rig.memory();
        let posted: Vec<_> = rig.conns.values().map(|c| c.recvs.len()).collect();
        let permits: Vec<_> = (0..63).map(|_| rig.permit()).collect();
        let signalled = rig.signalled;
        for round in 0..50 {
            for permit in &permits {
                rig.write(permit, memory, round).unwrap();
            }
            assert_eq!(rig.ios.len(), 63, "round {round}");
            rig.reply_all();
        }
        assert_eq!(rig.completed.len(), 50 * 63);
        let now: Vec<_> = rig.conns.values().map(|c| c.recvs.len()).collect();
        assert_eq!(posted, now);
        let signalled = rig.signalled - signalled;
        assert!((50..=50 * 63 / 16).contains(&signalled), "{signalled} signalled");
    }
}

// tests [RT-22]: a device with short queues makes requests wait, not fail.
#[test]
fn requests_wait_for_room() {
    for refresh in [false, true] {
        let attr = PortAttr { max_qp_wr: 32, max_sge: 4, ..ATTR };
        let mut rig = Rig::of_device(config(), refresh, attr, 1);
        rig.session.open(rig.now, &[addr(1)]);
        rig.pump();
        rig.sends_complete = false;
        rig.write_many(63);
        assert!(rig.ios.len() < 32, "{}", rig.ios.len());
        let mut ended = 0;
        while ended < 63 {
            let ios = std::mem::take(&mut rig.ios);
            let unsent = std::mem::take(&mut rig.unsent);
            assert!(!ios.is_empty() || !unsent.is_empty(), "stuck after {ended}");
            rig.session.handle_done(rig.now, &unsent);
            for io in &ios {
                rig.reply(io, 0);
            }
            rig.pump();
            ended += rig.take_completed().len();
        }
    }
}

// tests [RS-8], [RT-22]: an answer that is handled after the loss of its path makes room, but not
// for requests that wait on that path.
#[test]
fn nothing_is_posted_on_a_path_that_ends() {
    for refresh in [false, true] {
        let attr = PortAttr { max_qp_wr: 24, ..ATTR };
        let mut rig = Rig::of_device(config(), refresh, attr, 0x77);
        rig.session.open(rig.now, &[addr(1), addr(2)]);
        rig.pump();
        let second = rig.path(1);
        rig.session.disconnect_path(rig.now, second).unwrap();
        rig.pump();
        let permits = rig.write_many(40);
        let ios = std::mem::take(&mut rig.ios);
        assert!(ios.len() < permits.len(), "some wait");
        rig.drains = false;
        rig.break_conn(ios[0].conn);
        for io in &ios[1..] {
            rig.reply(io, 0);
        }
        rig.pump();
        assert_eq!(rig.ios.len(), 0);
        let answered = rig.take_completed();
        assert_eq!(answered.len(), ios.len() - 1);
        rig.session.reconnect_path(rig.now, second).unwrap();
        rig.pump();
        let ended = rig.conns.keys().copied().filter(|conn| conn.path == ios[0].conn.path);
        ended.collect::<Vec<_>>().into_iter().for_each(|conn| rig.drain(conn));
        rig.pump();
        while !rig.ios.is_empty() {
            assert!(rig.ios.iter().all(|io| io.conn.path != ios[0].conn.path));
            rig.reply_all();
        }
        let mut all = answered;
        all.extend(rig.take_completed());
        all.sort_unstable();
        assert_eq!(all, (0..40).map(|tag| (tag, 0)).collect::<Vec<_>>());
    }
}

// tests [RT-98]: memory that the program has released, and whose connection has nothing more to
// send.
#[test]
fn memory_is_released_at_the_next_heartbeat() {
    let mut rig = Rig::opened(false, 2);
    let tick = Duration::from_secs(5);
    let memories = [rig.memory(), rig.memory()];
    let permit = rig.permit();
    for memory in memories {
        rig.write(&permit, memory, 1).unwrap();
        rig.reply_all();
    }
    memories.iter().for_each(|memory| rig.session.drop_region(*memory));
    rig.pump();
    assert!(memories.iter().all(|memory| rig.buffers.contains_key(memory)), "to be sent again");
    rig.sends_complete = false;
    rig.pass(tick);
    assert_eq!(rig.fences, 1, "one for both");
    assert!(memories.iter().all(|memory| rig.buffers.contains_key(memory)));
    let unsent = std::mem::take(&mut rig.unsent);
    rig.session.handle_done(rig.now, &unsent);
    rig.pump();
    assert!(memories.iter().all(|memory| !rig.buffers.contains_key(memory)));
    // Connections that send more learn of completion by that.
    rig.sends_complete = true;
    let (memory, other) = (rig.memory(), rig.memory());
    rig.write(&permit, memory, 1).unwrap();
    rig.reply_all();
    rig.session.drop_region(memory);
    rig.write(&permit, other, 1).unwrap();
    rig.reply_all();
    assert!(!rig.buffers.contains_key(&memory));
    rig.pass(tick);
    assert_eq!(rig.fences, 1, "nobody waits");
}

// tests [RT-98]: a large amount of such memory is not kept until the heartbeat.
#[test]
fn much_memory_is_released_at_once() {
    let mut rig = Rig::opened(false, 2);
    let permit = rig.permit();
    // A mebibyte each, of which four may wait for a heartbeat.
    let memories: Vec<_> = (0..20).map(|_| rig.memory()).collect();
    for memory in &memories {
        rig.write(&permit, *memory, 1).unwrap();
        rig.reply_all();
    }
    for (n, memory) in (1..).zip(memories.clone()) {
        rig.session.drop_region(memory);
        rig.pump();
        let left = memories.iter().filter(|memory| rig.buffers.contains_key(memory)).count();
        // The fifth requests a completion; it shows that all was sent.
        let expected = if n <= 4 { (20, 0) } else { (20 - n, 1) };
        assert_eq!((left, rig.fences), expected, "{n}");
    }
}

// tests [RT-49]: a payload where the answer carries none is ignored; data may come with an answer.
#[test]
fn an_answer_may_carry_the_data_itself() {
    let mut rig = Rig::opened(false, 1);
    let memory = rig.memory();
    let permit = rig.permit();
    let data = [MemRef { region: memory, offset: 0, len: 4096 }];
    rig.session.request(rig.now, Dir::Read, &permit, b"get", &data, 1).unwrap();
    rig.pump();
    let io = rig.ios.remove(0);
    rig.give_imm(io.conn, Imm::Done { id: 0, errno: 0, invalidated: false });
    rig.pump();
    assert_eq!(rig.take_completed(), [(1, 0)]);
}

// tests [RS-41], [RS-42], [RS-46]
#[test]
fn a_path_counts_what_it_carries() {
    let mut rig = Rig::opened(true, 1);
    let memory = rig.memory();
    let permit = rig.session.get_permit(PermitKind::Io, 3).unwrap();
    rig.session.set_cpu(1);
    rig.write(&permit, memory, 0).unwrap();
    rig.now = rig.now + Duration::from_millis(3);
    rig.reply_all();
    let data = [MemRef { region: memory, offset: 0, len: 100 }];
    rig.session.request(rig.now, Dir::Read, &permit, b"12345", &data, 1).unwrap();
    rig.pump();
    {
        let path = rig.session.paths().next().unwrap();
        let stats = path.stats;
        assert_eq!((stats.reads, stats.read_bytes), (1, 105));
        assert_eq!((stats.writes, stats.write_bytes), (1, 4096 + 7));
        assert_eq!((path.inflight, stats.failovers), (1, 0));
        assert_eq!((stats.reconnects, stats.reconnects_failed), (0, 0));
        assert_eq!(stats.latencies.rows[2], [0, 1]);
        assert_eq!((stats.migration_from[3], stats.migration_to[1]), (1, 1));
        assert!(stats.wc_total > 0 && stats.wc_calls > 0 && stats.wc_max == 1);
    }
    let id = rig.path(0);
    assert!(rig.session.reset_stats(id, StatsFile::All));
    let path = rig.session.paths().next().unwrap();
    assert_eq!((path.stats.writes, path.inflight), (0, 1), "no underflow to come");
    rig.reply_all();
    assert_eq!(rig.session.paths().next().unwrap().inflight, 0);
}

// tests [RS-20], [RS-21], [RS-22], [RS-23]
#[test]
fn policies_choose_paths() {
    let mut rig = Rig::opened(false, 3);
    let paths: Vec<_> = (1..=3).map(|n| rig.live(n)[0].path).collect();
    let took = |rig: &mut Rig| {
        let permit = rig.permit();
        rig.session.request(rig.now, Dir::Write, &permit, b"", &[], 0).unwrap();
        rig.pump();
        rig.session.put_permit(permit);
        let io = rig.ios.last().unwrap();
        paths.iter().position(|path| *path == io.conn.path).unwrap()
    };
    // The fewest in flight, the first of equals.
    let order: Vec<_> = (0..6).map(|_| took(&mut rig)).collect();
    assert_eq!(order, [0, 1, 2, 0, 1, 2]);
    let io = rig.ios.remove(1);
    rig.reply(&io, 0);
    assert_eq!(took(&mut rig), 1);
    rig.reply_all();
    rig.session.set_policy(Policy::RoundRobin);
    let order: Vec<_> = (0..4).map(|_| took(&mut rig)).collect();
    assert_eq!(order, [0, 1, 2, 0]);
    // Round-robin skips a path that is not connected.
    let second = rig.path(1);
    rig.reply_all();
    rig.session.disconnect_path(rig.now, second).unwrap();
    rig.pump();
    let order: Vec<_> = (0..4).map(|_| took(&mut rig)).collect();
    assert_eq!(order, [2, 0, 2, 0]);
    rig.reply_all();
    // Before the first heartbeat the fewest in flight count.
    rig.session.set_policy(Policy::MinLatency);
    assert_eq!([took(&mut rig), took(&mut rig)], [0, 2]);
    rig.reply_all();
    // The quickest answer to a heartbeat: the third path answers sooner than the first, and gets
    // more requests, but not all of them.
    rig.pass(Duration::from_secs(1));
    let beats = std::mem::take(&mut rig.beats);
    assert_eq!(beats.len(), 2);
    for (conn, _) in beats.iter().rev() {
        rig.now = rig.now + Duration::from_millis(1);
        rig.give_imm(*conn, Imm::HbAck);
        rig.pump();
    }
    let order: Vec<_> = (0..6).map(|_| took(&mut rig)).collect();
    assert_eq!(order, [2, 0, 2, 2, 0, 2]);
}

// tests [RS-21]
#[test]
fn round_robin_goes_on_when_a_path_goes() {
    let mut settings = config();
    settings.policy = Policy::RoundRobin;
    let mut rig = Rig::opened_with(settings, false, 3);
    let took = |rig: &mut Rig| {
        let permit = rig.permit();
        rig.session.request(rig.now, Dir::Write, &permit, b"", &[], 0).unwrap();
        rig.pump();
        rig.session.put_permit(permit);
        let local = rig.conns[&rig.ios[0].conn].local;
        rig.reply_all();
        (1..=3).find(|n| addr(*n).0.src == local).unwrap()
    };
    assert_eq!([took(&mut rig), took(&mut rig)], [1, 2]);
    // The path used last is removed: its successor counts as the last.
    rig.session.remove_path(rig.now, rig.path(1)).unwrap();
    rig.pump();
    assert_eq!([took(&mut rig), took(&mut rig), took(&mut rig)], [1, 3, 1]);
    rig.session.remove_path(rig.now, rig.path(1)).unwrap();
    rig.pump();
    assert_eq!([took(&mut rig), took(&mut rig)], [1, 1]);
}
