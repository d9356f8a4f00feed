//! What a client's refusal to map a disk means.

use bowline_ctl::Errno;

use super::Refusal;

/// Says why a disk was not mapped, by the number that its client has answered with.
pub(super) fn not_mapped(refusal: Refusal, device: &str, server: &str) -> Refusal {
    let why = match refusal.errno {
        Errno::ENOENT => {
            format!("{server} has no disk {device}; `rnbd exports` there lists those that it has")
        }
        Errno::ECONNABORTED => format!(
            "the session with {server} ended before {device} was open: `rnbd session list` shows \
             its state; try again when its server runs"
        ),
        Errno::ETIMEDOUT => format!(
            "{server} has not answered for {device}: its machine or its server may be down, or a \
             firewall blocks UDP port 4791"
        ),
        Errno::ECONNRESET => format!(
            "{server} refused the connection for {device}: no server listens at its port, or it \
             does not accept this session"
        ),
        Errno::EPERM => {
            format!("{server} does not open {device}: another session has it open for writing")
        }
        Errno::EACCES => format!(
            "{server} does not open {device} with this access: it is read-only there, or no \
             --grant allows it; try ro"
        ),
        _ => return refusal,
    };
    Refusal::new(refusal.errno, why)
}
