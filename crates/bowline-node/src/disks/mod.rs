//! Disks over RTRS, of a node and of the commands that serve or map some by themselves.
//!
//! ```text
//! exports: Export -> Served (exports, log)                --.
//! maps:    MapConfig -> DiskFrontEnds (disks, front ends) --+-> Engine -> rnbd-driver
//! node:    Settings -> HostDisks -> Served, DiskFrontEnds      one device for all of them
//! ```

mod block_device;
mod client;
mod clients;
mod device;
mod ending;
mod exported;
mod failing;
mod front_ends;
mod handed;
mod host;
pub mod kept;
mod lost;
mod mapping;
mod noted;
mod opening;
mod paths;
mod replace;
mod served;
mod settings;
mod trouble;
pub mod values;
pub mod watch;

pub use client::{
    ClientObjects, UNMAP_PATIENCE, client_classes, report_all, say_what_is_cut_off, unmap_all,
};
pub use device::{DeviceConfig, Route, RouteConfig};
pub use ending::{ENDING_PATIENCE, Unserved};
pub use exported::{Export, ServingConfig};
pub use failing::FailingDisks;
pub use front_ends::{DiskFrontEnds, DiskNotice, FrontEndConfig, Mapping, map_options};
pub use handed::HandedFrontEnds;
pub use mapping::{MapConfig, map_patiently, refused};
pub use opening::PreparedFrontEnds;
pub use paths::{no_address, no_path, path_spec, prefixed, session_name};
pub use replace::{FREE_POLL, FREE_WAIT, Heir, Packed, Parcel, Predecessor, Service};
pub use served::{Served, server_classes, server_modules};
pub use settings::Settings;
pub use trouble::Trouble;

pub(crate) use host::HostDisks;
pub(crate) use settings::Tables;
