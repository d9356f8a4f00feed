//! Posts the frames of connections, in the thread of the sender.

use bowline_base::clock;
use bowline_rds::{RdmaAccess, RdmaLinkId, RdmaPiece, RdmaRequest, RdmaStatus, RdmaWork};
use bowline_verbs::{Remote, SendFlags, SendOp, SendWr, Sge};

use super::Job;
use crate::shared::Shared;
use crate::todo::Scratch;

/// Number of frames that are posted with one doorbell.
const FRAMES_MAX: usize = 64;

/// Requests that are about to be posted.
#[derive(Debug, Default)]
pub(crate) struct Posts {
    requests: Vec<Request>,
    sges: Vec<Sge>,
}

/// A request whose local memory is a part of [`Posts::sges`].
#[derive(Debug)]
struct Request {
    id: u64,
    op: SendOp,
    flags: SendFlags,
    sges: usize,
}

impl Shared {
    /// Posts everything that a connection has to send, as far as there is room.
    pub(crate) fn post_sends(&self, sc: &mut Scratch, id: RdmaLinkId) {
        loop {
            let mut st = self.lock();
            let now = st.at(clock::now());
            // What waits goes over the next connection.
            let Some(pair) = st.rdma_pair(id).filter(|pair| !pair.is_broken()) else { return };
            let Posts { requests, sges } = &mut sc.posts;
            requests.clear();
            sges.clear();
            st.core.poll_rdma_requests(now, id, FRAMES_MAX, |request, payload| {
                requests.push(match request {
                    RdmaRequest::Frame(send) => {
                        sges.push(pair.write_frame(send.id, &send.header, payload));
                        let mut flags = SendFlags::empty();
                        flags.set(SendFlags::SIGNALED, send.signalled);
                        flags.set(SendFlags::SOLICITED, send.solicited);
                        flags.set(SendFlags::FENCE, send.fence);
                        Request { id: send.id, op: SendOp::Send, flags, sges: 1 }
                    }
                    RdmaRequest::Work(work) => {
                        let sge = |piece: &RdmaPiece| {
                            let RdmaPiece { addr, len, lkey } = *piece;
                            Sge { addr, len, lkey }
                        };
                        sges.extend(work.local.iter().map(sge));
                        let mut flags = SendFlags::empty();
                        flags.set(SendFlags::SIGNALED, work.signalled);
                        Request { id: work.id, op: op_of(&work), flags, sges: work.local.len() }
                    }
                });
            });
            if requests.is_empty() {
                self.collect(&mut st, sc, None);
                return;
            }
            drop(st);
            let mut rest = &sges[..];
            let wrs: Vec<_> = requests
                .iter()
                .map(|request| {
                    let (sges, after) = rest.split_at(request.sges);
                    rest = after;
                    let (id, flags) = (request.id, request.flags);
                    SendWr { id, op: request.op.clone(), sges, inline: &[], flags }
                })
                .collect();
            let port = &self.rdma[pair.port];
            self.stats.rdma_doorbells.inc();
            self.stats.rdma_frames_sent.add(wrs.len() as u64);
            let posted = if pair.is_broken() {
                Ok(())
            } else {
                port.device.post_send(pair.qpn, &wrs).map_err(|(accepted, _)| accepted)
            };
            if let Err(accepted) = posted {
                // An operation that the device does not take has failed [RDMA-33].
                if let Some(refused) = requests.get(accepted) {
                    let mut st = self.lock();
                    let now = st.now;
                    st.core.handle_rdma_failed(now, id, refused.id, RdmaStatus::OtherError);
                }
                if !pair.fail() {
                    port.send_job(Job::Failed(id));
                }
            }
            let mut st = self.lock();
            let now = st.now;
            st.core.handle_rdma_posted(now, id);
            // What became ready meanwhile is posted in the next round.
            self.collect(&mut st, sc, None);
            if !sc.todo.post.contains(&id) {
                return;
            }
            sc.todo.post.retain(|waiting| *waiting != id);
        }
    }
}

/// Atomics are those that every device answers [ATOM-6].
fn op_of(work: &RdmaWork<'_>) -> SendOp {
    let remote = Remote { addr: work.remote, rkey: work.rkey };
    match work.access {
        RdmaAccess::Write => SendOp::Write(remote),
        RdmaAccess::Read => SendOp::Read(remote),
        RdmaAccess::CompareSwap { compare, swap } => SendOp::CompareSwap { remote, compare, swap },
        RdmaAccess::FetchAdd(add) => SendOp::FetchAdd { remote, add },
    }
}
