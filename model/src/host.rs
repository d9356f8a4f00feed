//! The rings of a socket in many orders of its programs' threads and the node's.

use std::sync::Arc;

use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;

use crate::area::at;
use crate::hook;
use crate::rings::{Mistake, Node, Socket};

/// Most steps that a program makes before it is killed: more than the longest one has.
const STEPS: usize = 200;
/// Room for the bytes of a message or two, and for all.
const SMALL: usize = 40;
const LARGE: usize = 400;

/// Runs a model in many orders.
fn check(model: fn()) {
    check_forgetting(None, model);
}

/// The same while the stores at a place are forgotten.
fn check_forgetting(at: Option<usize>, model: fn()) {
    hook::forget(at);
    crate::check(model);
}

/// Messages of a program.
fn messages(owner: u32) -> impl Iterator<Item = u8> {
    let first = owner as u8 * 16 + 6;
    (first..).take(4)
}

/// Two programs send on one socket, of whose messages so many bytes have room. The node sleeps
/// between them, or leaves the socket alone while nothing happens.
fn sends(mistake: Mistake, room: usize, idles: bool) {
    let socket = Arc::new(Socket::new(mistake));
    let send = |owner| {
        let socket = Arc::clone(&socket);
        thread::spawn(move || messages(owner).for_each(|n| socket.send(owner, n)))
    };
    let programs = [1, 2].map(send);
    let mut node = Node::new(&socket, room, idles);
    node.run(|node| node.sent.len() == 8);
    programs.into_iter().for_each(|program| program.join().unwrap());
    check_sent(&node.sent, 1, true);
    check_sent(&node.sent, 2, true);
    node.check_end(true);
}

/// Checks that what a program has sent came once, and in order.
fn check_sent(sent: &[u8], owner: u32, is_alive: bool) {
    let of_it: Vec<u8> = sent.iter().copied().filter(|n| u32::from(n / 16) == owner).collect();
    assert!(messages(owner).take(of_it.len()).eq(of_it.iter().copied()), "each once, in order");
    assert!(!is_alive || of_it.len() == 4, "and all");
}

/// Two programs send on one socket, of which one is killed between any two steps.
fn sends_of_one_that_is_killed(mistake: Mistake) {
    let socket = Arc::new(Socket::new(mistake));
    let other = Arc::clone(&socket);
    let killed = thread::spawn(move || {
        hook::die_after(thread_rng().gen_range(0..STEPS));
        messages(2).take_while(|_| !hook::is_dead()).for_each(|n| other.send(2, n));
        other.end_channel(2);
    });
    let other = Arc::clone(&socket);
    let program = thread::spawn(move || messages(1).for_each(|n| other.send(1, n)));
    let mut node = Node::new(&socket, LARGE, true).knows_destination();
    node.run(|node| {
        let of_other = node.sent.iter().filter(|n| **n < 32);
        of_other.count() == 4 && node.gone == 1
    });
    killed.join().unwrap();
    program.join().unwrap();
    check_sent(&node.sent, 1, true);
    check_sent(&node.sent, 2, false);
    assert!(socket.is_unlocked(), "the lock is free");
    node.check_end(false);
}

/// Two readers of one socket get half of what comes for it each. Some is too long for the ring, and
/// there is room for a few messages.
fn receives(mistake: Mistake, waits: [bool; 2], buffer: usize) {
    let socket = Arc::new(Socket::new(mistake));
    let read = |owner: u32| {
        let socket = Arc::clone(&socket);
        thread::spawn(move || socket.receive(owner, 4, waits[owner as usize - 1]))
    };
    let readers = [1, 2].map(read);
    let network = Arc::clone(&socket);
    let network = thread::spawn(move || (4..8).for_each(|n| network.arrive(n)));
    let mut node = Node::new(&socket, LARGE, true).receives(8, &[0, 1, 2, 3], buffer);
    node.run(|node| node.is_done);
    socket.close();
    readers.into_iter().for_each(|reader| reader.join().unwrap());
    network.join().unwrap();
    check_received(&socket, 8);
    node.check_end(true);
}

/// Checks that everything was received once, and by each reader in order.
fn check_received(socket: &Socket, messages: u8) {
    let of_each = [1, 2].map(|owner| socket.received(owner));
    assert!(of_each.iter().all(|all| all.is_sorted()), "each reader receives in order");
    let mut all = of_each.concat();
    all.sort_unstable();
    assert!(all.into_iter().eq(0..messages), "each once");
}

/// One of two readers is killed between any two steps. The node sees its channel end, or, if the
/// process never had one, looks after a while.
fn receives_beside_one_that_is_killed(mistake: Mistake, has_channel: bool, first: u8) {
    let socket = Arc::new(Socket::new(mistake));
    let other = Arc::clone(&socket);
    let killed = thread::spawn(move || {
        hook::die_after(thread_rng().gen_range(0..STEPS));
        other.receive(2, usize::MAX, true);
        if has_channel {
            other.end_channel(2);
        } else {
            other.look();
        }
    });
    let other = Arc::clone(&socket);
    let reader = thread::spawn(move || other.receive(1, usize::MAX, true));
    let messages: Vec<u8> = (first..8).collect();
    let mut node = Node::new(&socket, LARGE, true).receives(messages.len(), &messages, usize::MAX);
    node.run(|node| node.is_done);
    socket.close();
    killed.join().unwrap();
    reader.join().unwrap();
    let mut all = [1, 2].map(|owner| socket.received(owner)).concat();
    all.sort_unstable();
    assert_eq!(all, messages, "each once");
}

/// Programs send and receive at the same time.
fn both(mistake: Mistake) {
    let socket = Arc::new(Socket::new(mistake));
    let other = Arc::clone(&socket);
    let reader = thread::spawn(move || other.receive(1, usize::MAX, true));
    let other = Arc::clone(&socket);
    let sender = thread::spawn(move || messages(2).for_each(|n| other.send(2, n)));
    let mut node = Node::new(&socket, SMALL, true).receives(4, &[0, 1, 2, 3], 2);
    node.run(|node| node.is_done && node.sent.len() == 4);
    socket.close();
    reader.join().unwrap();
    sender.join().unwrap();
    check_received(&socket, 4);
    check_sent(&node.sent, 2, true);
    node.check_end(true);
}

#[test]
fn what_is_sent_comes_once_and_in_order() {
    check(|| sends(Mistake::None, SMALL, false));
    check(|| sends(Mistake::None, LARGE, true));
    check(|| sends(Mistake::None, SMALL, true));
}

#[test]
fn what_is_sent_beside_one_that_is_killed_comes() {
    check(|| sends_of_one_that_is_killed(Mistake::None));
}

#[test]
fn what_is_received_comes_once_and_in_order() {
    check(|| receives(Mistake::None, [true, true], usize::MAX));
    check(|| receives(Mistake::None, [true, false], 3));
    check(|| receives(Mistake::None, [false, false], 2));
}

#[test]
fn what_is_received_beside_one_that_is_killed_comes() {
    check(|| receives_beside_one_that_is_killed(Mistake::None, true, 0));
    check(|| receives_beside_one_that_is_killed(Mistake::None, false, 0));
    check(|| receives_beside_one_that_is_killed(Mistake::None, false, 7));
}

#[test]
fn programs_that_send_and_receive_wait_for_nothing() {
    check(|| both(Mistake::None));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_node_that_does_not_look_before_it_sleeps_is_found() {
    check(|| sends(Mistake::SleepsUnseen, LARGE, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_node_that_leaves_a_socket_unseen_is_found() {
    check(|| sends(Mistake::SleepsUnseen, LARGE, true));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_node_that_looks_before_it_says_that_it_sleeps_is_found() {
    check(|| sends(Mistake::LooksTooSoon, LARGE, false));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_program_that_wakes_nobody_is_found() {
    check(|| sends(Mistake::WakesNobody, LARGE, true));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_node_that_says_nowhere_that_it_sleeps_is_found() {
    check_forgetting(Some(at::ASLEEP), || sends(Mistake::None, LARGE, true));
}

#[test]
#[should_panic(expected = "in order")]
fn a_message_that_is_asked_for_and_overtakes_is_found() {
    check(|| sends(Mistake::SendsAskedFirst, SMALL, true));
}

#[test]
#[should_panic(expected = "credit is given once")]
fn credit_that_is_given_twice_is_found() {
    check(|| sends(Mistake::GivesCreditTwice, SMALL, true));
}

#[test]
#[should_panic(expected = "credit")]
fn bytes_sent_that_are_not_counted_is_found() {
    check_forgetting(Some(at::SENT_BYTES), || sends(Mistake::None, SMALL, true));
}

#[test]
#[should_panic(expected = "the lock is free")]
fn a_lock_that_a_killed_program_keeps_is_found() {
    check(|| sends_of_one_that_is_killed(Mistake::LeavesLock));
}

#[test]
#[should_panic(expected = "nothing is left")]
fn a_message_of_a_killed_program_that_is_left_is_found() {
    check(|| sends_of_one_that_is_killed(Mistake::LeavesPushed));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_wake_token_that_comes_before_its_message_is_found() {
    check(|| both(Mistake::ShowsTooSoon));
}

#[test]
#[should_panic(expected = "deadlock")]
fn what_does_not_fit_and_is_not_shown_is_found() {
    check(|| receives(Mistake::HidesMore, [true, true], usize::MAX));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_program_that_keeps_the_token_to_itself_is_found() {
    check(|| receives(Mistake::KeepsToken, [true, true], usize::MAX));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_wake_token_whose_taker_does_not_say_so_is_found() {
    check_forgetting(Some(at::WAKE_TOKEN_TAKEN), || {
        receives(Mistake::None, [true, true], usize::MAX)
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_node_that_asks_for_no_notice_is_found() {
    check(|| receives(Mistake::AsksForNoNotice, [true, true], 2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_node_that_rests_and_does_not_look_what_was_taken_is_found() {
    check(|| receives(Mistake::RestsUnseen, [true, true], 2));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_program_that_ignores_the_notice_is_found() {
    check(|| receives(Mistake::IgnoresNotice, [true, true], 2));
}

#[test]
#[should_panic(expected = "in order")]
fn a_message_that_is_asked_for_and_is_received_too_soon_is_found() {
    check(|| receives(Mistake::ReceivesAskedFirst, [true, true], usize::MAX));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_wake_token_that_a_killed_program_keeps_is_found() {
    check(|| receives_beside_one_that_is_killed(Mistake::LeavesToken, true, 0));
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_wake_token_that_a_killed_child_keeps_is_found() {
    check(|| receives_beside_one_that_is_killed(Mistake::LooksAtRingsOnly, false, 7));
}
