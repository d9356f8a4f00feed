//! Opening a shared library and taking plain C functions out of it.

use libloading::{Library, Symbol};

/// A library that stays open as long as the process lives.
pub(super) struct Lib {
    lib: &'static Library,
    name: &'static str,
}

impl Lib {
    /// Opens the first of `names` that exists.
    pub(super) fn open(names: &[&'static str]) -> Result<Self, String> {
        for &name in names {
            // SAFETY: the libraries named by this crate are ordinary C libraries whose start-up
            // code has no preconditions.
            if let Ok(lib) = unsafe { Library::new(name) } {
                return Ok(Self { lib: Box::leak(Box::new(lib)), name });
            }
        }
        Err(format!("{} is not installed", names.first().copied().unwrap_or("library")))
    }

    /// Takes one function.
    ///
    /// # Safety
    ///
    /// `F` must be the function pointer type of the symbol, as the library's manual gives it.
    pub(super) unsafe fn get<F: Copy + 'static>(&self, symbol: &'static str) -> Result<F, String> {
        // SAFETY: the caller vouches for the type; the library is never closed.
        let found: Result<Symbol<'static, F>, _> = unsafe { self.lib.get(symbol.as_bytes()) };
        found.map(|f| *f).map_err(|_| format!("{} lacks {symbol}", self.name))
    }
}
