//! RTRS and RNBD: what a server answers to a client, from the first request to connect on.

mod client;
mod connections;
mod disks;
mod paths;

use std::net::IpAddr;
use std::sync::Arc;

use bowline_verbs::Device;
use bowline_wire::rtrs::ConReq;

use crate::rule::{Finding, Other, Profile};
use crate::{Error, Options, Report, rule};
use client::{Client, Path};

/// Which of its rules a server is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// What it answers to requests to connect.
    Connections,
    /// RTRS on a connected path.
    Paths,
    /// RNBD.
    Disks,
}

/// What the rules are asked with.
struct Scene {
    client: Client,
    profile: Profile,
    /// A path that serves, for rules that do not end it.
    path: Option<Path>,
    /// A disk that may be opened.
    disk: Option<String>,
}

/// Asks a server on RDMA, from the address of a device. Rules of disks that need one are asked of
/// the disk that is named, which is only read.
///
/// # Errors
/// [`Error`] when the device does not serve, or nobody answers.
pub fn ask(
    device: Arc<dyn Device>,
    local: IpAddr,
    peer: IpAddr,
    part: Part,
    disk: Option<&str>,
    options: &Options,
) -> Result<Report, Error> {
    let client = Client::new(device, local, peer, options.patience)
        .map_err(|error| Error::Failed(format!("the device does not serve: {error}")))?;
    let given = options.profile.unwrap_or(Profile::Linux612);
    let mut scene = Scene { client, profile: given, path: None, disk: disk.map(str::to_owned) };
    match scene.reach() {
        Ok(shown) => scene.profile = options.profile.unwrap_or(shown),
        Err(Other::Deviates(why) | Other::Skipped(why)) => {
            return Err(Error::Failed(format!("{peer} cannot be asked: {why}")));
        }
    }
    let table: &[rule::Rule<Scene>] = match part {
        Part::Connections => &connections::RULES,
        Part::Paths => &paths::RULES,
        Part::Disks => &disks::RULES,
    };
    let end = |_: &mut Scene, _: &Finding| Ok(());
    let findings = rule::ask(table, options, &mut scene, |scene| scene.profile, end)?;
    if let Some(path) = scene.path.take() {
        scene.client.leave(&path.conns);
    }
    Ok(Report { profile: scene.profile, findings })
}

impl Scene {
    /// Sees whether anybody is there at all, and whether that is bowline: only it accepts notices,
    /// which are offered in bytes that kernels do not look at [RT-101].
    fn reach(&mut self) -> Result<Profile, Other> {
        let offer = ConReq { gives_notice: true, ..self.client.new_path() };
        let (conn, rsp) = match self.client.accepted(&offer) {
            Ok(accepted) => accepted,
            // It looks at those bytes, which is a finding of its own [RT-28].
            Err(_) => {
                let req = self.client.new_path();
                self.client.accepted(&req)?
            }
        };
        self.client.leave(&[conn]);
        Ok(if rsp.accepts_notice { Profile::Bowline } else { Profile::Linux612 })
    }

    /// A path that serves: the one of the last rule, or a new one.
    fn path(&mut self) -> Result<Path, Other> {
        match self.path.take() {
            Some(path) => Ok(path),
            None => {
                let req = self.client.new_path();
                let name = self.client.session_name();
                self.client.path(&req, &name)
            }
        }
    }

    /// Runs something on a path that serves, which is kept if it succeeds.
    fn on_path<T>(
        &mut self,
        run: impl FnOnce(&mut Client, &mut Path) -> Result<T, Other>,
    ) -> Result<T, Other> {
        let mut path = self.path()?;
        let done = run(&mut self.client, &mut path);
        if done.is_ok() {
            self.path = Some(path);
        } else {
            self.client.leave(&path.conns);
        }
        done
    }
}
