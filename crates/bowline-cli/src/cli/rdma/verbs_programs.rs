//! What verbs programs see that `bowline run` starts.

use std::path::PathBuf;

use bowline_node::{
    Failure, Outcome,
    rdma_device::{Holder, PORT},
    verbs::beside,
};
use bowline_roce_driver::Host;
use serde_json::{Value, json};

use crate::cli::rds::run::{
    started,
    verbs::{At, DEVICE, Outlook, Trouble, devices_of_machine, library},
};

/// The device of such programs.
pub(super) struct View {
    library: Option<PathBuf>,
    /// Devices of the machine itself, which programs then keep.
    own: Vec<String>,
    /// Where the node serves that programs would have.
    place: Option<PathBuf>,
    outlook: Outlook,
    /// Why programs get no device, and what to do.
    trouble: Option<String>,
}

impl View {
    pub(super) fn new() -> Self {
        let (library, own) = (library(), devices_of_machine());
        let mut view =
            Self { library, own, place: None, outlook: Outlook::default(), trouble: None };
        if view.own.is_empty() {
            view.trouble = view.look().err();
        }
        view
    }

    /// Finds the node, and its device; fails where programs get none.
    fn look(&mut self) -> Result<(), String> {
        self.place = started::look()?;
        let verbs = self.place.as_ref().map(|place| beside(place));
        if let (Some(place), Some(verbs)) = (&self.place, &verbs)
            && !bowline_ctl::is_socket(verbs)
        {
            return Err(format!(
                "the node at {} has no RDMA for programs: start it again, with this version",
                place.display()
            ));
        }
        self.outlook = Outlook::of(verbs.as_deref())
            .map_err(|error| format!("the node gives programs no RDMA: {error}"))?;
        if self.outlook.gids.is_empty() {
            return Err("no address is left for an RDMA device: see those that are left out, and \
                end the programs that have them"
                .to_owned());
        }
        if self.library.is_none() {
            return Err("bowline-ibverbs is not there: install it beside `bowline`, or in \
                ../lib/bowline; `cargo build --profile shared --package bowline-ibverbs` builds it"
                .to_owned());
        }
        Ok(())
    }

    /// Fails where programs get no device.
    pub(super) fn outcome(&self) -> Outcome {
        self.trouble.clone().map_or(Ok(()), |trouble| {
            Err(Failure::failed(format!(
                "verbs programs of `bowline run` get no device: {trouble}"
            )))
        })
    }

    fn has_device(&self) -> bool {
        self.own.is_empty() && self.trouble.is_none()
    }

    pub(super) fn show(&self) {
        say!("verbs programs of `bowline run`: {}", self.first_line());
        match &self.library {
            Some(path) => say!("  library  {}", path.display()),
            None => say!("  library  bowline-ibverbs is not installed"),
        }
        if !self.own.is_empty() {
            return;
        }
        match (&self.place, self.outlook.node) {
            (Some(place), Some((process, 0))) => {
                say!("  node     {}, process {process}, used by no program", place.display());
            }
            (Some(place), Some((process, programs))) => {
                say!("  node     {}, process {process}, programs: {programs}", place.display());
            }
            (Some(place), None) => say!("  node     {}", place.display()),
            (None, _) => say!("  node     none runs; `bowline run` starts one"),
        }
        let names = self.outlook.gids.iter().chain(self.outlook.left_out.iter().map(|(at, _)| at));
        let wide = names.map(|at| at.interface_name().len()).max().unwrap_or(0).max(9);
        for (index, at) in self.outlook.gids.iter().enumerate() {
            say!("  GID {index:>3}  RoCE v2  {:wide$}  {}", at.interface_name(), at.addr);
        }
        for (at, trouble) in &self.outlook.left_out {
            let name = at.interface_name();
            say!("  left out          {name:wide$}  {}: {}", at.addr, text(at, *trouble));
        }
    }

    fn first_line(&self) -> String {
        if !self.own.is_empty() {
            let own = self.own.join(", ");
            return format!("this machine has RDMA devices, which they keep: {own}");
        }
        if !self.has_device() {
            return "no device".to_owned();
        }
        let mtu = self.outlook.mtu.map_or_else(String::new, |mtu| format!(" MTU {},", mtu.bytes()));
        format!("{DEVICE}, port 1 active,{mtu} GUID {:016x}", self.outlook.guid)
    }

    pub(super) fn object(&self) -> Value {
        let Outlook { gids, left_out, guid, mtu, node } = &self.outlook;
        let gid = |(index, at): (usize, &At)| {
            let (addr, interface) = (at.addr.to_string(), at.interface_name());
            json!({ "index": index, "type": "RoCE v2", "address": addr, "interface": interface })
        };
        let missing = |(at, trouble): &(At, Trouble)| {
            let holder = if *trouble == Trouble::Taken { at.holder() } else { None };
            let holder = holder.map(|by| json!({ "pid": by.pid, "name": by.name }));
            json!({
                "address": at.addr.to_string(),
                "interface": at.interface_name(),
                "trouble": text(at, *trouble),
                "holder": holder,
            })
        };
        let node = self.place.as_ref().map(|place| {
            let (process, programs) = node.unzip();
            json!({ "place": place, "process": process, "programs": programs })
        });
        json!({
            "device": self.has_device().then_some(DEVICE),
            "port_state": self.has_device().then_some("active"),
            "mtu": mtu.map(|mtu| mtu.bytes()),
            "guid": self.has_device().then(|| format!("{guid:016x}")),
            "gids": gids.iter().enumerate().map(gid).collect::<Vec<_>>(),
            "left_out": left_out.iter().map(missing).collect::<Vec<_>>(),
            "library": self.library,
            "node": node,
            "devices_of_machine": self.own,
            "trouble": self.trouble,
        })
    }
}

/// Why programs do not get an address.
fn text(at: &At, trouble: Trouble) -> String {
    match trouble {
        Trouble::Taken => match at.holder() {
            Some(Holder { pid, name }) => {
                format!("process {pid} ({name}) has UDP port {PORT} there")
            }
            None => format!("another program has UDP port {PORT} there"),
        },
        Trouble::CameLater => "it was not free when the node's first verbs program came; a node \
            that starts again has it"
            .to_owned(),
        Trouble::TooMany => {
            format!("a node shares {} addresses, and has as many others", Host::ADDRS_MAX)
        }
        Trouble::Twice => "another interface has the same address".to_owned(),
    }
}
