//! The part of the nanomsg C interface the bench uses, found at run time.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use super::dl::Lib;

const AF_SP: c_int = 1;
const PROTO_PUSH: c_int = 80;
const PROTO_PULL: c_int = 81;
const PROTO_PAIR: c_int = 16;
const SOL_SOCKET: c_int = 0;
const OPT_SNDBUF: c_int = 2;
const OPT_RCVBUF: c_int = 3;
const OPT_RCVMAXSIZE: c_int = 16;

struct Api {
    socket: unsafe extern "C" fn(c_int, c_int) -> c_int,
    setsockopt: unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, usize) -> c_int,
    bind: unsafe extern "C" fn(c_int, *const c_char) -> c_int,
    connect: unsafe extern "C" fn(c_int, *const c_char) -> c_int,
    send: unsafe extern "C" fn(c_int, *const c_void, usize, c_int) -> c_int,
    recv: unsafe extern "C" fn(c_int, *mut c_void, usize, c_int) -> c_int,
}

fn load() -> Result<Api, String> {
    let lib = Lib::open(&["libnanomsg.so.5", "libnanomsg.so.6", "libnanomsg.so"])?;
    macro_rules! get {
        ($name:literal) => {
            // SAFETY: the types are those of nn.h of version 1.
            unsafe { lib.get($name)? }
        };
    }
    Ok(Api {
        socket: get!("nn_socket"),
        setsockopt: get!("nn_setsockopt"),
        bind: get!("nn_bind"),
        connect: get!("nn_connect"),
        send: get!("nn_send"),
        recv: get!("nn_recv"),
    })
}

fn api() -> Result<&'static Api, String> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Says whether the library can be used; it has no call that tells its version.
pub(crate) fn nanomsg_version() -> Result<String, String> {
    api().map(|_| "1.x".into())
}

/// The socket types the bench uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NanoKind {
    /// Sends only.
    Push,
    /// Receives only.
    Pull,
    /// Sends to and receives from one peer.
    Pair,
}

/// A nanomsg socket. It is never closed: the process ends first.
pub(crate) struct NanoSocket {
    api: &'static Api,
    socket: c_int,
}

impl NanoSocket {
    /// Opens a socket with `buffer` bytes of queue each way.
    pub(crate) fn new(kind: NanoKind, buffer: usize) -> Result<Self, String> {
        let api = api()?;
        let protocol = match kind {
            NanoKind::Push => PROTO_PUSH,
            NanoKind::Pull => PROTO_PULL,
            NanoKind::Pair => PROTO_PAIR,
        };
        // SAFETY: nn_socket takes plain integers.
        let socket = unsafe { (api.socket)(AF_SP, protocol) };
        if socket < 0 {
            return Err("nn_socket failed".into());
        }
        let this = Self { api, socket };
        let buffer = c_int::try_from(buffer).unwrap_or(c_int::MAX);
        for (option, value) in [(OPT_SNDBUF, buffer), (OPT_RCVBUF, buffer), (OPT_RCVMAXSIZE, -1)] {
            let (at, len) = (ptr::from_ref(&value).cast(), size_of::<c_int>());
            // SAFETY: pointer and length describe `value`.
            unsafe { (api.setsockopt)(socket, SOL_SOCKET, option, at, len) };
        }
        Ok(this)
    }

    /// Binds.
    pub(crate) fn bind(&self, endpoint: &str) -> Result<(), String> {
        let text = super::c_string(endpoint)?;
        // SAFETY: the text ends in a zero byte.
        match unsafe { (self.api.bind)(self.socket, text.as_ptr()) } {
            id if id >= 0 => Ok(()),
            _ => Err(format!("nn_bind {endpoint} failed")),
        }
    }

    /// Connects.
    pub(crate) fn connect(&self, endpoint: &str) -> Result<(), String> {
        let text = super::c_string(endpoint)?;
        // SAFETY: the text ends in a zero byte.
        match unsafe { (self.api.connect)(self.socket, text.as_ptr()) } {
            id if id >= 0 => Ok(()),
            _ => Err(format!("nn_connect {endpoint} failed")),
        }
    }

    /// Sends one message.
    pub(crate) fn send(&self, message: &[u8]) -> Result<(), String> {
        let (at, len) = (message.as_ptr().cast(), message.len());
        // SAFETY: pointer and length describe `message`, which the library copies.
        match unsafe { (self.api.send)(self.socket, at, len, 0) } {
            n if n >= 0 => Ok(()),
            _ => Err("nn_send failed".into()),
        }
    }

    /// Receives one message and returns its length.
    pub(crate) fn recv(&self, buf: &mut [u8]) -> Result<usize, String> {
        let (at, len) = (buf.as_mut_ptr().cast(), buf.len());
        // SAFETY: pointer and length describe `buf`.
        let n = unsafe { (self.api.recv)(self.socket, at, len, 0) };
        match usize::try_from(n) {
            Ok(n) if n <= buf.len() => Ok(n),
            Ok(n) => Err(format!("nn_recv gave a message of {n} bytes")),
            Err(_) => Err("nn_recv failed".into()),
        }
    }
}

impl std::fmt::Debug for NanoSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NanoSocket").field("socket", &self.socket).finish_non_exhaustive()
    }
}
