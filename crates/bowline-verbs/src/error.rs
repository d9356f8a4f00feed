//! The error of a verb.

use core::fmt;

use bowline_base::Errno;

use crate::InvalidReason;

/// The error of a verb; a verb that fails has changed nothing.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No such object, or it belongs to another owner. `EINVAL`.
    NoSuch(Object),
    /// The object is still in use. `EBUSY`.
    Busy(Object),
    /// An argument or attribute is invalid, or not allowed in this state. `EINVAL`.
    Invalid(InvalidReason),
    /// The queue is full. `ENOMEM`, as verbs have it.
    QueueFull,
    /// A limit of the device or of the settings is reached. `ENOMEM`.
    Limit(Resource),
    /// Address in use. `EADDRINUSE`.
    AddrInUse(String),
    /// Not an address of this device. `EADDRNOTAVAIL`.
    AddrNotAvailable,
    /// The provider does not support this. `EOPNOTSUPP`.
    NotSupported(Feature),
    /// The time limit has passed. `ETIMEDOUT`.
    TimedOut,
    /// The device is closed. `ENODEV`.
    Closed,
    /// A system call failed.
    System {
        /// The action that failed, and advice where there is any.
        what: String,
        /// The errno of the system.
        errno: Errno,
    },
}

impl Error {
    /// Returns the errno that a verbs program would get.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::NoSuch(_) | Self::Invalid(_) => Errno::EINVAL,
            Self::Busy(_) => Errno::EBUSY,
            Self::QueueFull | Self::Limit(_) => Errno::ENOMEM,
            Self::AddrInUse(_) => Errno::EADDRINUSE,
            Self::AddrNotAvailable => Errno::EADDRNOTAVAIL,
            Self::NotSupported(_) => Errno::EOPNOTSUPP,
            Self::TimedOut => Errno::ETIMEDOUT,
            Self::Closed => Errno::ENODEV,
            Self::System { errno, .. } => *errno,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuch(what) => write!(f, "no such {what}"),
            Self::Busy(what) => write!(f, "the {what} is still in use"),
            Self::Invalid(what) => write!(f, "{what}"),
            Self::QueueFull => write!(f, "the queue is full"),
            Self::Limit(what) => write!(f, "the limit of {what} is reached"),
            Self::AddrInUse(what) => write!(f, "{what}"),
            Self::AddrNotAvailable => write!(f, "not an address of this device"),
            Self::NotSupported(what) => write!(f, "{what} is not supported by this provider"),
            Self::TimedOut => write!(f, "timed out"),
            Self::Closed => write!(f, "the device is closed"),
            Self::System { what, errno } => {
                write!(f, "{what}: {}", std::io::Error::from_raw_os_error(errno.0))
            }
        }
    }
}

/// The same text, because `main` prints this form when it returns the error.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

/// The error stays inside: `downcast` gives it back.
impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        error.errno().wrap(error)
    }
}

/// A kind of object of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Object {
    /// A protection domain.
    ProtectionDomain,
    /// A memory region.
    MemoryRegion,
    /// A memory window.
    MemoryWindow,
    /// A completion queue.
    CompletionQueue,
    /// A shared receive queue.
    SharedReceiveQueue,
    /// A queue pair.
    QueuePair,
    /// A connection.
    Connection,
    /// What a [`CmId`](crate::CmId) names: a listener or a connection.
    CmId,
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ProtectionDomain => "protection domain",
            Self::MemoryRegion => "memory region",
            Self::MemoryWindow => "memory window",
            Self::CompletionQueue => "completion queue",
            Self::SharedReceiveQueue => "shared receive queue",
            Self::QueuePair => "queue pair",
            Self::Connection => "connection",
            Self::CmId => "listener or connection",
        })
    }
}

/// A resource that a device, or its settings, have a limit of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Resource {
    /// Protection domains.
    ProtectionDomains,
    /// Memory regions.
    MemoryRegions,
    /// Memory windows.
    MemoryWindows,
    /// Completion queues.
    CompletionQueues,
    /// Entries of a completion queue.
    CqEntries,
    /// Shared receive queues.
    SharedReceiveQueues,
    /// Queue pairs.
    QueuePairs,
    /// Work requests of a queue.
    WorkRequests,
    /// Elements of a gather or scatter list.
    Sges,
    /// Inline bytes of a queue pair.
    InlineBytes,
    /// One of the sizes in a [`QpCap`](crate::QpCap), where the device does not say which.
    QpSize,
    /// Listeners.
    Listeners,
    /// Connections.
    Connections,
    /// Handles of the addresses that datagrams go to.
    AddressHandles,
    /// Memory.
    Memory,
    /// Processes that share the addresses of a machine.
    Processes,
    /// Multicast groups, and queue pairs attached to them.
    MulticastGroups,
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ProtectionDomains => "protection domains",
            Self::MemoryRegions => "memory regions",
            Self::MemoryWindows => "memory windows",
            Self::CompletionQueues => "completion queues",
            Self::CqEntries => "completion queue entries",
            Self::SharedReceiveQueues => "shared receive queues",
            Self::QueuePairs => "queue pairs",
            Self::WorkRequests => "work requests",
            Self::Sges => "elements of a list",
            Self::InlineBytes => "inline bytes",
            Self::QpSize => "requests, elements or inline bytes of a queue pair",
            Self::Listeners => "listeners",
            Self::Connections => "connections",
            Self::AddressHandles => "address handles",
            Self::Memory => "memory",
            Self::Processes => "processes that share the machine's addresses",
            Self::MulticastGroups => "multicast groups",
        })
    }
}

/// A feature that not every provider supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// [`Device::alloc_inner_pd`](crate::Device::alloc_inner_pd).
    InnerDomain,
    /// [`Device::withdraw_keys`](crate::Device::withdraw_keys).
    WithdrawKeys,
    /// [`Device::renew_keys`](crate::Device::renew_keys).
    RenewKeys,
    /// [`SendOp::RegMr`](crate::SendOp::RegMr).
    FastRegistration,
    /// [`SendOp::Flush`](crate::SendOp::Flush) and
    /// [`SendOp::AtomicWrite`](crate::SendOp::AtomicWrite).
    Flush,
    /// [`Device::alloc_mw`](crate::Device::alloc_mw).
    MemoryWindow,
    /// [`Device::create_srq`](crate::Device::create_srq).
    SharedReceiveQueue,
    /// [`Access::FLUSH_PERSISTENT`](crate::Access::FLUSH_PERSISTENT).
    PersistentMemory,
    /// [`Buffer::of_process`](crate::Buffer::of_process).
    ForeignMemory,
    /// [`ConnParam::is_led`](crate::ConnParam::is_led).
    LedQueuePair,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InnerDomain => "a protection domain within another",
            Self::WithdrawKeys => "withdrawing keys",
            Self::RenewKeys => "renewing keys",
            Self::FastRegistration => "fast registration",
            Self::Flush => "a flush or atomic write",
            Self::MemoryWindow => "a memory window",
            Self::SharedReceiveQueue => "a shared receive queue",
            Self::PersistentMemory => "memory that outlives a loss of power",
            Self::ForeignMemory => "memory of another process",
            Self::LedQueuePair => "a connection whose queue pair the program leads",
        })
    }
}
