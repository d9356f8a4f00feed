//! What a run did, in numbers.

/// Numbers of a run that can be added up over many.
pub trait Numbers: Clone + Default {
    /// Adds the numbers of another run.
    fn add(&mut self, other: &Self);
    /// Names and values, in the order of the fields.
    fn fields(&self) -> Vec<(&'static str, u64)>;
}

/// Declares a struct of counters and how to add them up and show them.
macro_rules! numbers {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $field:ident,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$doc])* pub $field: u64,)+
        }

        impl $crate::Numbers for $name {
            fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)+
            }

            fn fields(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($field), self.$field),)+]
            }
        }
    };
}
pub(crate) use numbers;

numbers! {
    /// Sums over one run of a cluster or many.
    Stats {
        /// Steps taken.
        steps,
        /// Messages accepted by a node.
        sent,
        /// Messages handed to a receiver.
        received,
        /// Payload bytes handed to a receiver.
        received_bytes,
        /// Sends refused because a queue was full, a port congested or a handshake not done.
        refused,
        /// TCP connects begun.
        connects,
        /// TCP connections broken between their ends.
        cuts,
        /// Processes and machines stopped.
        crashes,
        /// Sockets closed and opened again.
        reopened,
        /// Faults of any kind.
        faults,
        /// Messages that a kernel peer lost or doubled by its own rules.
        kernel_quirks,
        /// Virtual time, milliseconds.
        virtual_ms,
    }
}
