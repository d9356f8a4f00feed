//! Packets on their way through a network that is bad by choice: held until they are due.

use core::cmp::Reverse;
use core::time::Duration;
use std::collections::BinaryHeap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bowline_base::Instant;
use bowline_base::clock;

use crate::impair::{Fate, Fates, Impairments, Way, damage};
use crate::shared::Shared;

/// Most packets and bytes in flight; what comes beyond is lost, as in a full queue.
const HELD_MAX: usize = 1 << 16;
const HELD_BYTES_MAX: usize = 256 << 20;
/// Both bits of the field for marks: the packet has met congestion.
const CE: u8 = 3;

/// A packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) way: Way,
    pub(crate) own: IpAddr,
    pub(crate) peer: SocketAddr,
    pub(crate) tos: u8,
    pub(crate) bytes: Vec<u8>,
}

/// A packet in flight; the number keeps those of one moment in order.
#[derive(Debug, PartialEq, Eq)]
struct Held {
    due: Instant,
    number: u64,
    packet: Packet,
}

impl Ord for Held {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (self.due, self.number).cmp(&(other.due, other.number))
    }
}

impl PartialOrd for Held {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Debug, Default)]
struct Queue {
    held: BinaryHeap<Reverse<Held>>,
    bytes: usize,
    count: u64,
    is_over: bool,
}

/// A network that is bad by choice.
#[derive(Debug)]
pub(crate) struct Line {
    fates: Fates,
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// What becomes of a packet now.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Passage {
    /// It passes as it is.
    Whole,
    /// It is lost, or held.
    Kept,
}

impl Line {
    pub(crate) fn new(settings: Impairments) -> Option<Self> {
        let fates = Fates::new(settings)?;
        Some(Self { fates, queue: Mutex::default(), changed: Condvar::new() })
    }

    /// Tells whether something may happen to packets that are sent.
    pub(crate) fn changes_sent(&self) -> bool {
        self.fates.changes_sent()
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides on a packet, of which a copy is made if it does not pass as it is. Counts what is
    /// lost.
    pub(crate) fn pass(
        &self,
        way: Way,
        own: IpAddr,
        peer: SocketAddr,
        tos: u8,
        bytes: &[u8],
        lost: &mut u64,
    ) -> Passage {
        let Some(fate) = self.fates.next(way, own, peer.ip()) else { return Passage::Whole };
        if fate.is_lost {
            *lost += 1;
            return Passage::Kept;
        }
        let marked = if fate.is_marked { tos | CE } else { tos };
        let Fate { damage: wrong, delay, comes_twice, .. } = fate;
        // Only its copy waits for a turn here, which others would overtake.
        let is_whole = wrong.is_none() && delay.is_zero() && marked == tos;
        let copies = usize::from(!is_whole) + usize::from(comes_twice);
        if copies == 0 {
            return Passage::Whole;
        }
        let mut packet = Packet { way, own, peer, tos: marked, bytes: bytes.to_vec() };
        if let Some(number) = wrong {
            damage(&mut packet.bytes, number);
        }
        let due = clock::now() + delay;
        let mut queue = self.lock();
        for _ in 0..copies {
            if queue.held.len() >= HELD_MAX || queue.bytes >= HELD_BYTES_MAX || queue.is_over {
                *lost += 1;
                continue;
            }
            queue.count += 1;
            queue.bytes += packet.bytes.len();
            let number = queue.count;
            queue.held.push(Reverse(Held { due, number, packet: packet.clone() }));
        }
        drop(queue);
        self.changed.notify_all();
        if is_whole { Passage::Whole } else { Passage::Kept }
    }

    /// Takes the next packet when it is due; waits until then, or until the end.
    fn next(&self) -> Option<Packet> {
        let mut queue = self.lock();
        loop {
            let now = clock::now();
            let due = queue.held.peek().map(|Reverse(first)| first.due);
            queue = match due {
                Some(due) if due <= now => {
                    let Reverse(first) = queue.held.pop()?;
                    queue.bytes -= first.packet.bytes.len();
                    return Some(first.packet);
                }
                None if queue.is_over => return None,
                None => self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(due) => {
                    let left = due.saturating_since(now).max(Duration::from_micros(1));
                    let waited = self.changed.wait_timeout(queue, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Takes no more packets; those in flight still arrive.
    pub(crate) fn end(&self) {
        self.lock().is_over = true;
        self.changed.notify_all();
    }
}

/// Delivers packets until the end of the line.
pub(crate) fn deliver(shared: &Arc<Shared>) {
    let Some(line) = &shared.line else { return };
    while let Some(packet) = line.next() {
        match packet.way {
            Way::In => shared.take_in_alone(packet.peer, packet.own, packet.tos, &packet.bytes),
            Way::Out => shared.send_alone(&packet),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Line {
        let all = vec![text.parse().unwrap()];
        Line::new(Impairments::new(all, 1).unwrap()).unwrap()
    }

    fn pass(line: &Line, number: u8, lost: &mut u64) -> Passage {
        let own = IpAddr::from([127, 0, 0, 1]);
        line.pass(Way::In, own, SocketAddr::new(own, 1), 2, &[number], lost)
    }

    #[test]
    fn packets_come_when_they_are_due_and_in_order() {
        let line = line("delay=3ms");
        let (begun, mut lost) = (clock::now(), 0);
        assert!((0..20).all(|number| pass(&line, number, &mut lost) == Passage::Kept));
        let came: Vec<u8> = (0..20).map(|_| line.next().unwrap().bytes[0]).collect();
        assert!(clock::now().saturating_since(begun) >= Duration::from_millis(3));
        assert_eq!((came, lost), ((0..20).collect(), 0));
        pass(&line, 7, &mut lost);
        line.end();
        assert!(line.next().is_some(), "it is in flight");
        assert_eq!((line.next(), lost), (None, 0));
        pass(&line, 8, &mut lost);
        assert_eq!((line.next(), lost), (None, 1));
    }

    #[test]
    fn a_packet_is_marked_or_comes_twice() {
        let (line, mut lost) = (line("ce=100%,duplicate=100%"), 0);
        pass(&line, 9, &mut lost);
        let both = [line.next().unwrap(), line.next().unwrap()];
        assert!(both.iter().all(|one| one.tos == 3 && one.bytes == [9]), "{both:?}");
        assert_eq!(line.lock().bytes, 0);
    }

    #[test]
    fn only_the_copy_is_late_where_a_packet_comes_twice() {
        let (line, mut lost) = (line("duplicate=100%"), 0);
        assert_eq!(pass(&line, 9, &mut lost), Passage::Whole);
        assert_eq!(line.next().unwrap().bytes, [9]);
        assert!(line.lock().held.is_empty());
    }

    #[test]
    fn a_full_line_loses_packets() {
        let (line, mut lost) = (line("delay=1s"), 0);
        (0..HELD_MAX + 5).for_each(|_| _ = pass(&line, 0, &mut lost));
        assert_eq!(lost, 5);
    }
}
