//! The command that is written to `map_device`.

use std::{fmt, str::FromStr};

use bowline_ctl::{Errno, PathSpec};
use bowline_wire::rnbd::Access;

/// Most paths in one command [NB-29].
pub const PATHS_MAX: usize = 6;
/// Length of the longest accepted name, and of the part that is kept, in bytes [NB-34].
const NAME_MAX: usize = 255;
const NAME_KEPT: usize = 254;

/// A path of a new session.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MapPath {
    /// Its addresses.
    pub addresses: PathSpec,
    /// Port of the server on it, if one was given before it.
    pub port: Option<u16>,
}

/// A command to map a disk [NB-34].
///
/// `Display` gives a command that parses to the same.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MapSpec {
    /// Name of the session; it is opened when there is none of that name.
    pub session: String,
    /// Name of the device on the server.
    pub device: String,
    /// Paths of a new session.
    pub paths: Vec<MapPath>,
    /// Port of paths that are added later, if one was given. Without one, a kernel uses 1234, and a
    /// client of bowline the port it was started with.
    pub port: Option<u16>,
    /// Access mode the device is opened with.
    pub access: Access,
    /// Connections for polled IO; -1 for as many as there are processors.
    pub poll_queues: i32,
    /// Other words of the form `NAME=VALUE`, which a kernel refuses: options of the program that
    /// maps the disk [NB-63].
    pub options: Vec<String>,
}

impl MapSpec {
    /// Returns the number of connections for polled IO that `poll_queues` stands for [NB-34].
    pub fn poll_connections(&self) -> u16 {
        u16::try_from(self.poll_queues)
            .unwrap_or_else(|_| u16::try_from(processors()).unwrap_or(u16::MAX))
    }
}

impl FromStr for MapSpec {
    type Err = Errno;

    /// `EINVAL` for text that the kernel does not understand, `ENOMEM` for the seventh path,
    /// `ENODEV` for a GID.
    fn from_str(text: &str) -> Result<Self, Errno> {
        let (mut session, mut device) = (None, None);
        let mut paths = Vec::new();
        let (mut port, mut access, mut poll_queues) = (None, Access::Rw, 0);
        let mut options = Vec::new();
        for word in text.split_ascii_whitespace() {
            let (name, value) = word.split_once('=').ok_or(Errno::EINVAL)?;
            match name {
                "sessname" => session = Some(kept(value)?),
                "device_path" => device = Some(kept(value)?),
                "path" if paths.len() == PATHS_MAX => return Err(Errno::ENOMEM),
                "path" => {
                    let addresses = value.parse().map_err(bad_address)?;
                    paths.push(MapPath { addresses, port });
                }
                "dest_port" => port = Some(value.parse().map_err(|_| Errno::EINVAL)?),
                "access_mode" => access = access_of(value).ok_or(Errno::EINVAL)?,
                "nr_poll_queues" => poll_queues = poll_queues_of(value)?,
                _ => options.push(word.to_owned()),
            }
        }
        let (Some(session), Some(device)) = (session, device) else { return Err(Errno::EINVAL) };
        Ok(Self { session, device, paths, port, access, poll_queues, options })
    }
}

/// Returns the access mode with a name.
fn access_of(name: &str) -> Option<Access> {
    [Access::Ro, Access::Rw, Access::Migration].into_iter().find(|access| access.name() == name)
}

fn poll_queues_of(text: &str) -> Result<i32, Errno> {
    let number: i32 = text.parse().map_err(|_| Errno::EINVAL)?;
    let fits = number == -1 || usize::try_from(number).is_ok_and(|number| number <= processors());
    if fits { Ok(number) } else { Err(Errno::EINVAL) }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn kept(name: &str) -> Result<String, Errno> {
    if name.is_empty() || name.len() > NAME_MAX {
        return Err(Errno::EINVAL);
    }
    let end = (0..=NAME_KEPT.min(name.len())).rev().find(|at| name.is_char_boundary(*at));
    Ok(name[..end.unwrap_or(0)].to_owned())
}

fn bad_address(errno: Errno) -> Errno {
    if errno == Errno::ENODEV { Errno::ENODEV } else { Errno::EINVAL }
}

impl fmt::Display for MapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sessname={} device_path={}", self.session, self.device)?;
        let mut said = None;
        let mut say = |f: &mut fmt::Formatter<'_>, port: Option<u16>| match port {
            Some(number) if port != said => {
                said = port;
                write!(f, " dest_port={number}")
            }
            _ => Ok(()),
        };
        for path in &self.paths {
            say(f, path.port)?;
            write!(f, " path={}", path.addresses)?;
        }
        say(f, self.port)?;
        if self.access != Access::Rw {
            write!(f, " access_mode={}", self.access)?;
        }
        if self.poll_queues != 0 {
            write!(f, " nr_poll_queues={}", self.poll_queues)?;
        }
        self.options.iter().try_for_each(|word| write!(f, " {word}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_names_session_device_and_paths() {
        // tests [NB-34]
        let text = " sessname=s1 path=ip:10.99.0.11@ip:10.99.0.1 dest_port=99  device_path=/dev/ram0 \
                    path=ip:10.99.1.1 access_mode=ro\n";
        let spec: MapSpec = text.parse().unwrap();
        assert_eq!((spec.session.as_str(), spec.device.as_str()), ("s1", "/dev/ram0"));
        assert_eq!(spec.paths[0].port, None);
        assert_eq!(spec.paths[1].port, Some(99));
        assert_eq!((spec.port, spec.access, spec.poll_queues), (Some(99), Access::Ro, 0));
        assert_eq!(spec.to_string().parse(), Ok(spec));
    }

    #[test]
    fn the_last_of_repeated_options_counts() {
        // tests [NB-34]
        let spec: MapSpec =
            "sessname=a device_path=b sessname=c nr_poll_queues=-1".parse().unwrap();
        assert_eq!((spec.session.as_str(), spec.poll_queues), ("c", -1));
        assert!(spec.paths.is_empty());
    }

    #[test]
    fn other_words_are_kept_for_the_program() {
        // tests [NB-63]
        let spec: MapSpec = "sessname=a nbd=/run/a.sock device_path=b outage=5".parse().unwrap();
        assert_eq!(spec.options, ["nbd=/run/a.sock", "outage=5"]);
        assert_eq!(spec.to_string().parse(), Ok(spec));
    }

    #[test]
    fn what_the_kernel_refuses_is_refused() {
        // tests [NB-34] [NB-29]
        let base = "sessname=s device_path=d";
        for tail in [
            "x",
            "access_mode=wr",
            "dest_port=65536",
            "dest_port=",
            "path=",
            "path=1.2.3.4",
            "path=tcp:1.2.3.4",
            "nr_poll_queues=-2",
            "nr_poll_queues=100000",
            "sessname=",
        ] {
            assert_eq!(format!("{base} {tail}").parse::<MapSpec>(), Err(Errno::EINVAL), "{tail}");
        }
        assert_eq!("device_path=d".parse::<MapSpec>(), Err(Errno::EINVAL));
        assert_eq!("sessname=s".parse::<MapSpec>(), Err(Errno::EINVAL));
        assert_eq!("".parse::<MapSpec>(), Err(Errno::EINVAL));
        let seven = " path=ip:1.2.3.4".repeat(7);
        assert_eq!(format!("{base}{seven}").parse::<MapSpec>(), Err(Errno::ENOMEM));
        assert_eq!(format!("{base} path=gid:fe80::1").parse::<MapSpec>(), Err(Errno::ENODEV));
        let long = "n".repeat(255);
        let spec: MapSpec = format!("sessname={long} device_path=d").parse().unwrap();
        assert_eq!(spec.session.len(), 254);
        assert_eq!(
            format!("sessname={long}n device_path=d").parse::<MapSpec>(),
            Err(Errno::EINVAL)
        );
    }
}
