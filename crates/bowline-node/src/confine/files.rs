//! Landlock: which paths a process opens, which TCP ports it connects to, whom it signals, to which
//! abstract names it connects.
//!
//! A kernel has one of several versions (ABI) of Landlock. What an older one does not know stays as
//! it was: ABI 1 knows paths, 3 truncation, 4 ports, 5 ioctls of devices, 6 signals and abstract
//! names.

use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, LandlockStatus, NetPort, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
};

use rustix::fs::{Mode, OFlags};

use super::{Confinement, Needs};

/// Version of which all rights over files are restricted. A newer one may know rights that bowline
/// has not been tried without.
const TRIED: ABI = ABI::V6;

/// Restricts the calling thread and those that it starts, and notes what came of it.
pub(super) fn restrict(needs: &Needs, confinement: &mut Confinement) {
    let hold =
        |path: &PathBuf| rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    confinement.held = needs.read.iter().filter_map(|path| hold(path).ok()).collect();
    let status = match rules(needs).and_then(RulesetCreated::restrict_self) {
        Ok(status) => status.landlock,
        Err(error) => return confinement.note("Landlock", Err(error)),
    };
    let abi = match status {
        LandlockStatus::Available { effective_abi, .. } => effective_abi,
        LandlockStatus::NotEnabled => {
            return confinement.note("Landlock", Err("disabled in this kernel"));
        }
        LandlockStatus::NotImplemented => {
            return confinement.note("Landlock", Err("this kernel does not have it"));
        }
    };
    confinement.note(&format!("Landlock ABI {}", abi as i32), Ok::<_, &str>(()));
    if needs.mounts {
        let why = "Landlock cannot restrict paths of a process that mounts";
        confinement.note("paths", Err(why));
    }
    for (what, since) in [
        ("truncation", ABI::V3),
        ("TCP ports", ABI::V4),
        ("device ioctls", ABI::V5),
        ("signals", ABI::V6),
        ("abstract sockets", ABI::V6),
    ] {
        if abi < since {
            confinement.note(what, Err(format!("needs Landlock ABI {}", since as i32)));
        }
    }
}

fn rules(needs: &Needs) -> Result<RulesetCreated, RulesetError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessNet::ConnectTcp)?
        .scope(Scope::Signal | Scope::AbstractUnixSocket)?;
    // A process that is restricted to some paths can mount and unmount nothing.
    if !needs.mounts {
        rules = rules.handle_access(AccessFs::from_all(TRIED))?;
    }
    let mut rules = rules.create()?;
    if !needs.mounts {
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        let files = read | AccessFs::WriteFile | AccessFs::Truncate;
        let files = files | AccessFs::MakeReg | AccessFs::RemoveFile;
        rules = rules
            .add_rules(path_beneath_rules(&needs.read, read))?
            .add_rules(path_beneath_rules(&needs.files, files))?;
    }
    let ports = needs.connect.iter().map(|port| Ok(NetPort::new(*port, AccessNet::ConnectTcp)));
    rules.add_rules(ports)
}
