//! Opening the libraries, and what is said when something is missing.

use core::fmt;
use std::path::Path;
use std::sync::OnceLock;

use bowline_base::Errno;
use bowline_verbs::Error;

use crate::ffi::{Rdma, Verbs};

const VERBS: &str = "libibverbs.so.1";
const RDMA: &str = "librdmacm.so.1";

/// Why there is no device.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unavailable {
    /// A library is not installed, or cannot be loaded.
    Library {
        /// Its file.
        file: &'static str,
        /// What the loader says.
        reason: String,
    },
    /// A library is older than what this needs (rdma-core 32).
    Symbol {
        /// Its file.
        file: &'static str,
        /// The function that it lacks.
        symbol: &'static str,
    },
    /// There is no RDMA device.
    NoDevice {
        /// The folder of device files exists.
        files: bool,
    },
    /// There are others, but none of this name.
    NoSuchDevice {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<String>,
    },
    /// The device, or the connection manager, cannot be used.
    Refused(Error),
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library { file, reason } => write!(
                f,
                "{file} cannot be loaded ({reason}); install the packages libibverbs1, \
                 ibverbs-providers and librdmacm1"
            ),
            Self::Symbol { file, symbol } => {
                write!(f, "{file} has no {symbol}; it must be of rdma-core 32 or newer")
            }
            Self::NoDevice { files: true } => write!(
                f,
                "no RDMA device; load its driver, or make one: rdma link add rxe0 type rxe netdev eth0"
            ),
            Self::NoDevice { files: false } => write!(
                f,
                "no RDMA device: there is no /dev/infiniband; load the modules ib_uverbs and rdma_ucm \
                 and the driver of a device"
            ),
            Self::NoSuchDevice { name, known } => {
                write!(f, "no RDMA device {name}; there is {}", known.join(", "))
            }
            Self::Refused(error) => error.fmt(f),
        }
    }
}

impl Unavailable {
    /// Returns the error number: `ENODEV` unless the device gave one.
    pub const fn errno(&self) -> Errno {
        match self {
            Self::Refused(error) => error.errno(),
            _ => Errno::ENODEV,
        }
    }
}

/// The same text, because `main` prints this form when it returns the error.
impl fmt::Debug for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Unavailable {}

/// The error stays inside: `downcast` gives it back.
impl From<Unavailable> for std::io::Error {
    fn from(error: Unavailable) -> Self {
        error.errno().wrap(error)
    }
}

impl From<Error> for Unavailable {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// Both libraries.
#[derive(Debug)]
pub(crate) struct Libraries {
    pub(crate) verbs: Verbs,
    pub(crate) rdma: Rdma,
}

/// Once opened, the libraries stay: they keep devices and threads of their own.
static OPENED: OnceLock<Libraries> = OnceLock::new();

impl Libraries {
    /// Opens both, unless that was done before.
    ///
    /// # Errors
    /// [`Unavailable::Library`], [`Unavailable::Symbol`].
    pub(crate) fn open() -> Result<&'static Self, Unavailable> {
        if let Some(opened) = OPENED.get() {
            return Ok(opened);
        }
        let verbs = Verbs::new(library(VERBS)?, VERBS)?;
        let rdma = Rdma::new(library(RDMA)?, RDMA)?;
        Ok(OPENED.get_or_init(|| Self { verbs, rdma }))
    }
}

fn library(file: &'static str) -> Result<libloading::Library, Unavailable> {
    // SAFETY: rdma-core's libraries do nothing on being loaded that this process could mind.
    let opened = unsafe { libloading::Library::new(file) };
    opened.map_err(|error| Unavailable::Library { file, reason: error.to_string() })
}

/// What is said when the list of devices is empty.
pub(crate) fn no_device() -> Unavailable {
    Unavailable::NoDevice { files: Path::new("/dev/infiniband").exists() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_told_in_one_line_that_helps() {
        let error = library("libbowline-does-not-exist.so.1").unwrap_err();
        assert!(matches!(error, Unavailable::Library { .. }), "{error:?}");
        let text = error.to_string();
        for word in ["libbowline-does-not-exist", "libibverbs1", "ibverbs-providers", "librdmacm1"]
        {
            assert!(text.contains(word), "{text}");
        }
        let text = Unavailable::NoDevice { files: false }.to_string();
        assert!(text.contains("/dev/infiniband"), "{text}");
        let known = vec!["rxe0".to_owned(), "rxe1".to_owned()];
        let text = Unavailable::NoSuchDevice { name: "mlx5_0".to_owned(), known }.to_string();
        assert!(text.contains("mlx5_0") && text.contains("rxe0, rxe1"), "{text}");
        assert!(!text.contains('\n'));
    }
}
