//! What node and programs call things.

/// A number by which a node knows something.
macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident($number:ty);)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[cfg_attr(feature = "serde", serde(transparent))]
        pub struct $name(pub $number);
    )*};
}

ids! {
    /// A socket, to its node. Nobody guesses it, since whoever knows it may wake the node for it.
    SocketHandle(u64);
    /// A node, to programs: they know it again by its number when they have another channel to it.
    NodeId(u64);
    /// A channel, to its node.
    ChannelId(u64);
    /// A channel, in the lock of [`Area::push`](crate::Area::push): never 0, which is nobody, nor
    /// the highest number, which is the node.
    LockOwner(u32);
}

impl ChannelId {
    /// The channel as the owner of a lock.
    pub const fn owner(self) -> LockOwner {
        LockOwner((self.0 % (u32::MAX as u64 - 1)) as u32 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_channel_locks_as_nobody_or_as_the_node() {
        let max = u64::from(u32::MAX);
        for (channel, owner) in
            [(0, 1), (1, 2), (max - 2, u32::MAX - 1), (max - 1, 1), (max, 2), (u64::MAX, 4)]
        {
            assert_eq!(ChannelId(channel).owner(), LockOwner(owner), "{channel}");
        }
    }
}
