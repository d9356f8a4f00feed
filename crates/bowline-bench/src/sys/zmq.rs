//! The part of the ZeroMQ C interface the bench uses, found at run time.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;

use super::dl::Lib;

const DEALER: c_int = 5;
const ROUTER: c_int = 6;
const OPT_LINGER: c_int = 17;
const OPT_LAST_ENDPOINT: c_int = 32;
const SNDMORE: c_int = 2;

/// Storage of a `zmq_msg_t`: 64 bytes by the library's published ABI.
#[repr(C, align(8))]
struct RawMessage([u8; 64]);

struct Api {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int, *mut c_int),
    ctx_new: unsafe extern "C" fn() -> *mut c_void,
    socket: unsafe extern "C" fn(*mut c_void, c_int) -> *mut c_void,
    setsockopt: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, usize) -> c_int,
    getsockopt: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut usize) -> c_int,
    bind: unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int,
    connect: unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int,
    send: unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int) -> c_int,
    msg_init: unsafe extern "C" fn(*mut RawMessage) -> c_int,
    msg_recv: unsafe extern "C" fn(*mut RawMessage, *mut c_void, c_int) -> c_int,
    msg_data: unsafe extern "C" fn(*mut RawMessage) -> *mut c_void,
    msg_size: unsafe extern "C" fn(*const RawMessage) -> usize,
}

fn load() -> Result<Api, String> {
    let lib = Lib::open(&["libzmq.so.5", "libzmq.so"])?;
    macro_rules! get {
        ($name:literal) => {
            // SAFETY: the types are those of zmq.h, which has kept them since version 3.
            unsafe { lib.get($name)? }
        };
    }
    Ok(Api {
        version: get!("zmq_version"),
        ctx_new: get!("zmq_ctx_new"),
        socket: get!("zmq_socket"),
        setsockopt: get!("zmq_setsockopt"),
        getsockopt: get!("zmq_getsockopt"),
        bind: get!("zmq_bind"),
        connect: get!("zmq_connect"),
        send: get!("zmq_send"),
        msg_init: get!("zmq_msg_init"),
        msg_recv: get!("zmq_msg_recv"),
        msg_data: get!("zmq_msg_data"),
        msg_size: get!("zmq_msg_size"),
    })
}

fn api() -> Result<&'static Api, String> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Returns the version of the installed library.
pub(crate) fn zmq_version() -> Result<String, String> {
    let (mut major, mut minor, mut patch) = (0, 0, 0);
    // SAFETY: the three pointers are valid integers.
    unsafe { (api()?.version)(&mut major, &mut minor, &mut patch) };
    Ok(format!("{major}.{minor}.{patch}"))
}

/// The two ends of the pattern the bench uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZmqKind {
    /// Sends to one peer.
    Dealer,
    /// Receives from many peers, each message preceded by its peer's name.
    Router,
}

/// A ZeroMQ context with its I/O thread. It is never closed: the process ends first.
#[derive(Debug)]
pub(crate) struct ZmqContext {
    ctx: *mut c_void,
}

impl ZmqContext {
    /// Starts a context.
    pub(crate) fn new() -> Result<Self, String> {
        // SAFETY: zmq_ctx_new has no preconditions.
        let ctx = unsafe { (api()?.ctx_new)() };
        if ctx.is_null() { Err("zmq_ctx_new failed".into()) } else { Ok(Self { ctx }) }
    }

    /// Opens a socket.
    pub(crate) fn socket(&self, kind: ZmqKind) -> Result<ZmqSocket, String> {
        let api = api()?;
        let number = match kind {
            ZmqKind::Dealer => DEALER,
            ZmqKind::Router => ROUTER,
        };
        // SAFETY: the context came from zmq_ctx_new and is never destroyed.
        let socket = unsafe { (api.socket)(self.ctx, number) };
        if socket.is_null() {
            return Err("zmq_socket failed".into());
        }
        let mut message = Box::new(RawMessage([0; 64]));
        // SAFETY: `message` has the size and alignment of a zmq_msg_t.
        unsafe { (api.msg_init)(&mut *message) };
        let linger: c_int = 0;
        let (value, len) = (ptr::from_ref(&linger).cast(), size_of::<c_int>());
        // SAFETY: pointer and length describe `linger`.
        unsafe { (api.setsockopt)(socket, OPT_LINGER, value, len) };
        Ok(ZmqSocket { api, socket, message })
    }
}

/// A ZeroMQ socket.
pub(crate) struct ZmqSocket {
    api: &'static Api,
    socket: *mut c_void,
    message: Box<RawMessage>,
}

impl ZmqSocket {
    /// Binds, and returns the endpoint as the library spells it.
    pub(crate) fn bind(&mut self, endpoint: &str) -> Result<String, String> {
        let text = super::c_string(endpoint)?;
        // SAFETY: the socket is open and the text ends in a zero byte.
        if unsafe { (self.api.bind)(self.socket, text.as_ptr()) } != 0 {
            return Err(format!("zmq_bind {endpoint}: {}", std::io::Error::last_os_error()));
        }
        let mut name = [0u8; 256];
        let mut len = name.len();
        let to = name.as_mut_ptr().cast();
        // SAFETY: pointer and length describe `name`.
        if unsafe { (self.api.getsockopt)(self.socket, OPT_LAST_ENDPOINT, to, &mut len) } != 0 {
            return Err("zmq_getsockopt failed".into());
        }
        let name = name.split(|b| *b == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(name).into_owned())
    }

    /// Connects.
    pub(crate) fn connect(&mut self, endpoint: &str) -> Result<(), String> {
        let text = super::c_string(endpoint)?;
        // SAFETY: the socket is open and the text ends in a zero byte.
        match unsafe { (self.api.connect)(self.socket, text.as_ptr()) } {
            0 => Ok(()),
            _ => Err(format!("zmq_connect {endpoint}: {}", std::io::Error::last_os_error())),
        }
    }

    /// Sends one part; `more` says that another part of the same message follows.
    pub(crate) fn send(&mut self, part: &[u8], more: bool) -> Result<(), String> {
        let flags = if more { SNDMORE } else { 0 };
        let (at, len) = (part.as_ptr().cast(), part.len());
        // SAFETY: pointer and length describe `part`, which the library copies.
        match unsafe { (self.api.send)(self.socket, at, len, flags) } {
            n if n >= 0 => Ok(()),
            _ => Err(format!("zmq_send: {}", std::io::Error::last_os_error())),
        }
    }

    /// Receives one part; the bytes are the library's own and live until the next call.
    pub(crate) fn recv(&mut self) -> Result<&[u8], String> {
        // SAFETY: the message was initialised; receiving into it releases what it held.
        if unsafe { (self.api.msg_recv)(&mut *self.message, self.socket, 0) } < 0 {
            return Err(format!("zmq_msg_recv: {}", std::io::Error::last_os_error()));
        }
        // SAFETY: the message is initialised.
        let len = unsafe { (self.api.msg_size)(&*self.message) };
        // SAFETY: the message is initialised.
        let data = unsafe { (self.api.msg_data)(&mut *self.message) };
        if data.is_null() || len == 0 {
            return Ok(&[]);
        }
        // SAFETY: the library keeps `len` bytes at `data` until the message is reused, which needs
        // `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(data.cast(), len) })
    }
}

impl std::fmt::Debug for ZmqSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZmqSocket").field("socket", &self.socket).finish_non_exhaustive()
    }
}
