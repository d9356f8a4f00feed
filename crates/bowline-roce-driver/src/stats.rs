//! What the driver itself did: system calls, packets, bytes.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts since the device was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct DriverStats { $($(#[$doc])* pub $name: u64,)* }

        #[derive(Debug, Default)]
        pub(crate) struct Stats { $(pub(crate) $name: Count,)* }

        impl Stats {
            pub(crate) fn snapshot(&self) -> DriverStats {
                DriverStats { $($name: self.$name.0.load(Relaxed),)* }
            }
        }

        impl core::ops::Sub for DriverStats {
            type Output = Self;

            fn sub(self, earlier: Self) -> Self {
                Self { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }
        }

        impl DriverStats {
            /// Returns every count with its name.
            pub fn named(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }
    };
}

stats! {
    /// Calls that sent: one per burst.
    sends,
    /// Those of them that sent several packets at once (UDP_SEGMENT).
    gso_sends,
    /// Packets sent.
    packets_sent,
    /// Bytes sent, from BTH to ICRC.
    bytes_sent,
    /// Calls that received something.
    receives,
    /// Calls that found nothing.
    empty_looks,
    /// Buffers that held several packets merged by the system (UDP_GRO).
    gro_buffers,
    /// Packets received.
    packets_received,
    /// Bytes received, from BTH to ICRC.
    bytes_received,
    /// Received buffers of no use: cut off, or from no address.
    unusable,
    /// Packets thrown away because the settings ask for it.
    packets_dropped,
    /// Times a send had to wait for room in the socket's buffer.
    send_waits,
    /// Packets not sent because the system refused; they count as lost.
    packets_refused,
    /// Those of them longer than the path carries: a wrong MTU setting [ICRC-20].
    packets_too_long,
    /// Times sending several packets at once was refused and given up [ICRC-22].
    gso_refused,
    /// Sleeps for the network or for the background thread's next look.
    sleeps,
    /// Writes to and reads from event descriptors.
    eventfds,
    /// Other threads made runnable.
    hand_overs,
    /// Turns of the background thread.
    helper_turns,
    /// Packets that could not be written to the capture file.
    capture_errors,
}

impl DriverStats {
    /// Returns the system calls for the network that moved something.
    pub fn udp_syscalls(&self) -> u64 {
        self.sends + self.receives
    }
}

#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    #[inline]
    pub(crate) fn inc(&self) {
        self.add(1);
    }

    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }
}
