//! Other users, whom a thread takes on. Only root can do so.

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

pub(crate) const STRANGER: u32 = 77_003;

/// Does something as another user, as whom the kernel knows whoever connects, listens or sends.
pub(crate) fn as_user<T: Send + 'static>(
    user: u32,
    groups: &[u32],
    what: impl FnOnce() -> T + Send + 'static,
) -> T {
    let groups: Vec<Gid> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
    let become_and_do = move || {
        if user != 0 {
            let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
            set_thread_groups(&groups).unwrap();
            set_thread_res_gid(gid, gid, gid).unwrap();
            set_thread_res_uid(uid, uid, uid).unwrap();
        }
        what()
    };
    std::thread::spawn(become_and_do).join().unwrap()
}
