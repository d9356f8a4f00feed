//! A client that sends arbitrary messages.

use std::net::IpAddr;
use std::sync::Arc;

use bowline_rtrs_driver::Dir;
use bowline_rtrs_driver::client::{Permit, PermitKind, Region, Session, SessionBuilder, Wait};
use bowline_wire::rnbd::{Access, Io, OPEN_RSP_LEN, OpenRsp, emit_open};

use super::Rig;

/// A raw client, with one request at a time.
pub(crate) struct Raw {
    pub(crate) session: Arc<Session>,
    pub(crate) region: Region,
    permit: Permit,
}

impl Raw {
    pub(crate) fn new(rig: &Rig, name: &str) -> Self {
        let paths: [(Option<IpAddr>, IpAddr); 1] = [(Some(rig.client_ip(0)), rig.server_ip(0))];
        let builder = SessionBuilder::new(name).unwrap().paths(&paths);
        Self::of(Session::open(rig.client_engine(), builder).unwrap())
    }

    /// Another raw client of the same session.
    pub(crate) fn beside(&self) -> Self {
        Self::of(Arc::clone(&self.session))
    }

    fn of(session: Arc<Session>) -> Self {
        let region = session.region(65_536).unwrap();
        let permit = session.get_permit(PermitKind::Io, Wait::Forever).unwrap();
        Self { session, region, permit }
    }

    /// Sends a message with `data` bytes of data; returns the errno of the answer.
    pub(crate) fn send(&self, dir: Dir, usr: &[u8], data: u32) -> i32 {
        let piece = [self.region.piece(0, data)];
        let data = if data == 0 { &piece[..0] } else { &piece[..] };
        self.session.call(dir, &self.permit, usr, data).map_or_else(|error| error.errno().0, |()| 0)
    }

    pub(crate) fn open_as(&self, access: Access, name: &[u8]) -> Result<OpenRsp, i32> {
        self.region.buffer().write(0, &[0xcc; 64]);
        let message = emit_open(access, name).unwrap();
        match self.send(Dir::Read, &message, OPEN_RSP_LEN as u32) {
            0 => {
                let mut bytes = [0; OPEN_RSP_LEN];
                self.region.buffer().read(0, &mut bytes);
                Ok(OpenRsp::parse(&bytes).unwrap())
            }
            errno => {
                let mut bytes = [0; 64];
                self.region.buffer().read(0, &mut bytes);
                assert_eq!(bytes, [0xcc; 64], "nothing comes with an error [NB-3]");
                Err(errno)
            }
        }
    }

    pub(crate) fn open(&self, name: &str) -> Result<u32, i32> {
        self.open_as(Access::Rw, name.as_bytes()).map(|rsp| rsp.device_id)
    }

    pub(crate) fn io(&self, dir: Dir, io: &Io, data: u32) -> i32 {
        self.send(dir, &io.emit(), data)
    }
}
