//! Capabilities: what root may do beyond what its files and processes allow it.

use rustix::{
    fs::{Access, AtFlags, CWD, accessat},
    io::Errno,
    thread::{
        CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
        clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    },
};

use super::{Confinement, Needs};

/// Leaves the calling thread and those that it starts what is needed, in all five sets of a thread,
/// and notes what came of it.
pub(super) fn give_up(needs: &Needs, confinement: &mut Confinement) {
    let asked = needs.capabilities.iter();
    let mut kept: Vec<_> = asked.map(|(one, why)| (*one, why.as_str())).collect();
    let done = reduce(needs, &mut kept);
    let kept: Vec<_> = kept.iter().map(|(one, why)| format!("{} {why}", name(*one))).collect();
    let what = match kept.as_slice() {
        [] => "no capabilities".to_owned(),
        some => format!("no capabilities except {}", some.join(" and ")),
    };
    confinement.note(&what, done);
}

/// Drops all but `kept`, from which goes what this thread does not have, and to which comes what
/// its folders need.
fn reduce(needs: &Needs, kept: &mut Vec<(CapabilitySet, &str)>) -> Result<(), Errno> {
    let had = capabilities(None)?.permitted;
    kept.retain(|(one, _)| had.contains(*one));
    let union = |kept: &[(CapabilitySet, &str)]| {
        kept.iter().fold(CapabilitySet::empty(), |all, (one, _)| all | *one)
    };
    // As this thread will be, to see which folders it can still change.
    let inheritable = CapabilitySet::empty();
    let sets = CapabilitySets { effective: union(kept), permitted: had, inheritable };
    set(sets)?;
    let rights = Access::WRITE_OK | Access::EXEC_OK;
    let is_closed = |folder| accessat(CWD, folder, rights, AtFlags::EACCESS) == Err(Errno::ACCESS);
    let owner = CapabilitySet::DAC_OVERRIDE;
    if had.contains(owner) && needs.files.iter().any(is_closed) {
        kept.push((owner, "for folders of other users"));
    }
    let kept = union(kept);
    if had.contains(CapabilitySet::SETPCAP) {
        let effective = kept | CapabilitySet::SETPCAP;
        set(CapabilitySets { effective, permitted: had, inheritable })?;
        // The kernel knows those below the first that it has no answer for.
        let all = (0..u64::BITS).map(|n| CapabilitySet::from_bits_retain(1 << n));
        for one in all.filter(|one| !kept.contains(*one)) {
            match capability_is_in_bounding_set(one) {
                Ok(true) => remove_capability_from_bounding_set(one)?,
                Ok(false) => {}
                Err(_) => break,
            }
        }
    }
    clear_ambient_capability_set()?;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable };
    set(sets)
}

/// Changes the sets of this thread. A service manager may have forbidden the call, having taken
/// everything away already.
fn set(sets: CapabilitySets) -> Result<(), Errno> {
    if capabilities(None)? == sets { Ok(()) } else { set_capabilities(None, sets) }
}

/// Returns the name of a capability without its prefix.
fn name(one: CapabilitySet) -> String {
    one.iter_names().map(|(name, _)| name).collect()
}
