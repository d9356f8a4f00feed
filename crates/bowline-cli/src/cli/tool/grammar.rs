//! `[mode] [target] command [arguments] [options]`: plain words, which may be left out where they
//! are unambiguous [NB-41].

use super::{
    Refusal,
    arguments::path_text,
    columns::{Fields, Mode, Target},
    format::{Format, Unit},
};

/// The verb of a command.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Verb {
    List,
    Show,
    Dump,
    Map,
    Export,
    Unexport,
    Resize,
    Unmap,
    Remap,
    Recover,
    Reconnect,
    Disconnect,
    Add,
    Delete,
    Readd,
    Close,
    Policy,
    Stats,
    Reset,
    Tree,
    Get,
    Set,
}

impl Verb {
    pub(super) const ALL: [(&'static str, Self); 22] = [
        ("list", Self::List),
        ("show", Self::Show),
        ("dump", Self::Dump),
        ("map", Self::Map),
        ("export", Self::Export),
        ("unexport", Self::Unexport),
        ("resize", Self::Resize),
        ("unmap", Self::Unmap),
        ("remap", Self::Remap),
        ("recover", Self::Recover),
        ("reconnect", Self::Reconnect),
        ("disconnect", Self::Disconnect),
        ("add", Self::Add),
        ("delete", Self::Delete),
        ("readd", Self::Readd),
        ("close", Self::Close),
        ("policy", Self::Policy),
        ("stats", Self::Stats),
        ("reset", Self::Reset),
        ("tree", Self::Tree),
        ("get", Self::Get),
        ("set", Self::Set),
    ];

    fn of(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(name, _)| *name == word).map(|(_, verb)| *verb)
    }

    /// Tells whether the verb applies to a side and a kind of object [NB-41].
    pub(super) const fn fits(self, mode: Option<Mode>, target: Option<Target>) -> bool {
        use {
            Mode::{Client, Server},
            Target::{Device, Path, Session},
        };
        let client = !matches!(mode, Some(Server));
        let server = !matches!(mode, Some(Client));
        match self {
            Self::List | Self::Show => true,
            Self::Dump | Self::Tree | Self::Get | Self::Set => target.is_none(),
            Self::Map | Self::Resize | Self::Unmap => {
                client && matches!(target, None | Some(Device))
            }
            Self::Remap => client && matches!(target, None | Some(Device | Session)),
            Self::Recover => client,
            Self::Reconnect => client && matches!(target, None | Some(Session | Path)),
            Self::Disconnect => match target {
                Some(Device) => false,
                Some(Session) => server,
                Some(Path) | None => true,
            },
            Self::Add | Self::Delete | Self::Readd => client && matches!(target, None | Some(Path)),
            Self::Close | Self::Export | Self::Unexport => {
                server && matches!(target, None | Some(Device))
            }
            Self::Policy => client && matches!(target, None | Some(Session)),
            Self::Stats | Self::Reset => matches!(target, None | Some(Session | Path)),
        }
    }

    /// Tells whether the verb shows something, which can be JSON.
    const fn prints(self) -> bool {
        use Verb::{Dump, Get, List, Policy, Show, Stats, Tree};
        matches!(self, List | Show | Dump | Policy | Stats | Tree | Get)
    }

    /// Explains to which sides and objects the verb applies, when it does not apply to those given.
    fn misfit(self, word: &str, mode: Option<Mode>, target: Option<Target>) -> String {
        let said: Vec<&str> =
            mode.map(Mode::name).into_iter().chain(target.map(Target::name)).collect();
        let said = said.join(" ");
        let all = [Mode::Client, Mode::Server].into_iter().flat_map(|mode| {
            [Target::Device, Target::Session, Target::Path].map(|target| (mode, target))
        });
        let fitting: Vec<String> = all
            .filter(|(mode, target)| self.fits(Some(*mode), Some(*target)))
            .map(|(mode, target)| format!("{} {}", mode.name(), target.name()))
            .collect();
        if fitting.is_empty() {
            return format!("{word} covers all devices, sessions and paths: leave out {said}");
        }
        format!(
            "there is no {word} for {said}; put one of these before the word: {}",
            fitting.join(", ")
        )
    }

    /// Least and largest number of names after the verb.
    const fn names(self) -> (usize, usize) {
        match self {
            Self::List | Self::Dump => (0, 0),
            Self::Tree => (0, 1),
            Self::Get
            | Self::Unexport
            | Self::Show
            | Self::Unmap
            | Self::Remap
            | Self::Recover
            | Self::Reconnect
            | Self::Disconnect
            | Self::Stats
            | Self::Reset => (1, 1),
            Self::Map => (3, usize::MAX),
            Self::Export => (2, usize::MAX),
            Self::Resize => (2, 3),
            Self::Add | Self::Set => (2, 2),
            Self::Delete | Self::Readd | Self::Close | Self::Policy => (1, 2),
        }
    }
}

/// Options of the output.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Options {
    pub(super) fields: Option<Fields>,
    pub(super) format: Format,
    pub(super) unit: Option<Unit>,
    pub(super) no_tree: bool,
    pub(super) no_headers: bool,
    pub(super) no_totals: bool,
    pub(super) force: bool,
    pub(super) add_missing: bool,
    pub(super) verbose: bool,
}

/// A parsed command.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Request {
    pub(super) mode: Option<Mode>,
    pub(super) target: Option<Target>,
    pub(super) verb: Verb,
    pub(super) names: Vec<String>,
    pub(super) options: Options,
}

/// Parses the arguments of a command.
pub(super) fn parse(arguments: &[String]) -> Result<Request, Refusal> {
    let mut rest = arguments.iter().map(String::as_str).peekable();
    let lower = |word: &&str| word.to_ascii_lowercase();
    let mut mode = None;
    if let Some(found) = rest.peek().and_then(|word| mode_of(&lower(word))) {
        mode = found;
        rest.next();
    }
    let target = rest.peek().and_then(|word| target_of(&lower(word)));
    if target.is_some() {
        rest.next();
    }
    let Some(word) = rest.next() else {
        return Err(Refusal::usage("a command is missing: list, show, map, ..; see --help"));
    };
    let verb = Verb::of(&lower(&word))
        .ok_or_else(|| Refusal::usage(format!("\"{word}\" is not a command; see --help")))?;
    if !verb.fits(mode, target) {
        return Err(Refusal::usage(verb.misfit(word, mode, target)));
    }
    let (fewest, most) = verb.names();
    let mut names = Vec::new();
    let mut options = Options::default();
    for word in rest {
        // The root of a tree may be given as an option.
        if verb == Verb::Tree && word == "--path" {
            continue;
        }
        if word == "--json" && verb.prints() {
            options.format = Format::Json;
            continue;
        }
        // Names come first; an argument that can only be an option is one anywhere.
        let is_name = names.len() < fewest;
        if !is_name && option(&mut options, verb, &word.to_ascii_lowercase())? {
            continue;
        }
        if names.len() == most {
            return Err(Refusal::usage(format!("\"{word}\" is not an option of this command")));
        }
        names.push(word.to_owned());
    }
    if names.len() < fewest {
        return Err(Refusal::usage(match verb {
            Verb::Map => {
                "map needs: DEVICE from SERVER [PATH..] [ro|rw|migration] [OPTION=VALUE..]"
                    .to_owned()
            }
            Verb::Export => {
                "export needs: NAME file=PATH, memory=BYTES or nbd-backend=URI".to_owned()
            }
            Verb::Resize => "resize needs: DEVICE SIZE [UNIT] [force]".to_owned(),
            Verb::Add => "add needs: SESSION PATH".to_owned(),
            Verb::Set => "set needs: FILE VALUE".to_owned(),
            _ => "a name is missing".to_owned(),
        }));
    }
    Ok(Request { mode, target, verb, names, options })
}

fn mode_of(word: &str) -> Option<Option<Mode>> {
    match word {
        "client" | "clt" | "cli" => Some(Some(Mode::Client)),
        "server" | "serv" | "srv" => Some(Some(Mode::Server)),
        "both" => Some(None),
        _ => None,
    }
}

fn target_of(word: &str) -> Option<Target> {
    match word {
        "device" | "devices" | "dev" | "devs" => Some(Target::Device),
        "session" | "sessions" | "sess" => Some(Target::Session),
        "path" | "paths" => Some(Target::Path),
        _ => None,
    }
}

/// Parses an argument as an option; returns false if it is none.
fn option(options: &mut Options, verb: Verb, word: &str) -> Result<bool, Refusal> {
    let shows = matches!(verb, Verb::List | Verb::Show | Verb::Dump);
    match word {
        "force" | "--force" => options.force = true,
        "add-missing" if verb == Verb::Recover => options.add_missing = true,
        "verbose" => options.verbose = true,
        "notree" if shows => options.no_tree = true,
        "noheaders" if shows => options.no_headers = true,
        "nototals" if shows => options.no_totals = true,
        _ if shows => {
            if let Some(format) = Format::of(word) {
                options.format = format;
            } else if let Some(unit) = Unit::of(word) {
                options.unit = Some(unit);
            } else if verb == Verb::List && word.contains(['.', ':', '@']) {
                // [NB-78] No field has these characters.
                return Err(Refusal::usage(format!(
                    "{word}: RNBD has no message that lists the disks of another machine; `rnbd exports` there \
                     does, and `rnbd map NAME --from {word}` maps one of them"
                )));
            } else {
                options.fields = Some(Fields::parse(word)?);
            }
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Reports whether an argument names a side.
pub(crate) fn is_mode(word: &str) -> bool {
    mode_of(&word.to_ascii_lowercase()).is_some()
}

/// Reports whether arguments name a kind of object, or need none: `add` and the like apply to
/// paths; dump, tree, get and set to everything.
pub(crate) fn has_target(arguments: &[String]) -> bool {
    let Some(word) = arguments.first().map(|word| word.to_ascii_lowercase()) else { return false };
    let is_clear = |verb: Verb| {
        !verb.fits(None, Some(Target::Session)) && !verb.fits(None, Some(Target::Device))
    };
    target_of(&word).is_some() || Verb::of(&word).is_some_and(is_clear)
}

/// Reports whether arguments name a path by both its addresses, with a verb that applies to paths.
/// Names of sessions contain @ too, and are no addresses.
pub(crate) fn names_path(arguments: &[String]) -> bool {
    let [word, name, ..] = arguments else { return false };
    let verb = Verb::of(&word.to_ascii_lowercase());
    verb.is_some_and(|verb| verb.fits(None, Some(Target::Path)))
        && name.contains(['@', ','])
        && path_text(name).is_ok()
}

/// Reports whether a completion applies to sessions.
pub(crate) fn is_of_sessions(word: &str) -> bool {
    let fits = |verb: Verb, target| verb.fits(None, Some(target));
    let is_of_disks = |verb: Verb| {
        fits(verb, Target::Device) && !fits(verb, Target::Session) && !fits(verb, Target::Path)
    };
    !["exports", "top", "verify"].contains(&word) && !Verb::of(word).is_some_and(is_of_disks)
}

/// An incomplete command, for completion.
struct Begun {
    mode: Option<Mode>,
    target: Option<Target>,
    verb: Option<Verb>,
    /// Number of arguments after the verb.
    behind: usize,
}

fn begun(arguments: &[String]) -> Begun {
    let arguments: Vec<String> = arguments.iter().map(|word| word.to_ascii_lowercase()).collect();
    let mut rest = arguments.iter().peekable();
    let mode =
        rest.next_if(|word| mode_of(word).is_some()).and_then(|word| mode_of(word)).flatten();
    let target = rest.next_if(|word| target_of(word).is_some()).and_then(|word| target_of(word));
    let verb = rest.next().and_then(|word| Verb::of(word));
    Begun { mode, target, verb, behind: rest.count() }
}

/// Returns of which sides and kinds of objects a name may come next.
pub(super) fn next_names(arguments: &[String]) -> (Vec<Mode>, Vec<Target>) {
    use Target::{Device, Path, Session};
    let Begun { mode, target, verb, behind } = begun(arguments);
    let Some(verb) = verb else { return (Vec::new(), Vec::new()) };
    let mut modes = mode.map_or(vec![Mode::Client, Mode::Server], |mode| vec![mode]);
    modes.retain(|mode| verb.fits(Some(*mode), target));
    let all: &[Target] = match (verb, behind) {
        (Verb::Show | Verb::Recover, 0) => &[Device, Session, Path],
        (Verb::Unmap | Verb::Resize | Verb::Close, 0) => &[Device],
        (Verb::Remap, 0) => &[Device, Session],
        (Verb::Add | Verb::Policy, 0) | (Verb::Close, 1) | (Verb::Map, 2) => &[Session],
        (Verb::Delete | Verb::Readd, 1) => &[Path],
        (
            Verb::Reconnect
            | Verb::Disconnect
            | Verb::Delete
            | Verb::Readd
            | Verb::Stats
            | Verb::Reset,
            0,
        ) => &[Session, Path],
        _ => &[],
    };
    let adds = matches!(verb, Verb::Add | Verb::Delete | Verb::Readd | Verb::Map | Verb::Close);
    let fits = |kind: &&Target| adds || target.is_none_or(|target| target == **kind);
    (modes, all.iter().filter(fits).copied().collect())
}

/// Returns the keywords that may come next, for completion.
pub(super) fn next(arguments: &[String]) -> Vec<&'static str> {
    let had_mode =
        arguments.first().is_some_and(|word| mode_of(&word.to_ascii_lowercase()).is_some());
    let Begun { mode, target, verb, behind } = begun(arguments);
    let Some(verb) = verb else {
        let mut all: Vec<&'static str> = Vec::new();
        if !had_mode && target.is_none() {
            all.extend(["client", "server", "both", "exports", "top", "verify"]);
        }
        if target.is_none() {
            all.extend(["device", "session", "path"]);
        }
        let verbs = Verb::ALL.iter().filter(|(_, verb)| verb.fits(mode, target));
        all.extend(verbs.map(|(name, _)| *name));
        return all;
    };
    match verb {
        Verb::List | Verb::Dump => LOOKS.to_vec(),
        Verb::Show if behind > 0 => LOOKS.to_vec(),
        Verb::Map if behind == 1 => vec!["from"],
        Verb::Map if behind > 2 => vec!["ro", "rw", "migration"],
        Verb::Unmap | Verb::Remap if behind > 0 => vec!["force"],
        Verb::Resize if behind > 1 => vec!["force"],
        Verb::Close | Verb::Unexport if behind > 0 => vec!["force"],
        Verb::Recover if behind == 0 => vec!["all"],
        Verb::Recover => vec!["add-missing"],
        Verb::Policy if behind > 0 => vec!["round-robin", "min-inflight", "min-latency"],
        _ => Vec::new(),
    }
}

const LOOKS: [&str; 13] =
    ["csv", "json", "xml", "B", "K", "M", "G", "T", "P", "E", "notree", "noheaders", "nototals"];

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn request(text: &str) -> Request {
        parse(&arguments(text)).unwrap()
    }

    #[test]
    fn words_may_be_left_out_and_have_short_forms() {
        // tests [NB-41]
        let all = request("CLIENT Devices LIST json notree");
        assert_eq!((all.mode, all.target), (Some(Mode::Client), Some(Target::Device)));
        assert_eq!((all.verb, all.options.format), (Verb::List, Format::Json));
        assert!(all.options.no_tree);
        let short = request("srv sess disconnect s1");
        assert_eq!((short.mode, short.target), (Some(Mode::Server), Some(Target::Session)));
        let bare = request("list");
        assert_eq!((bare.mode, bare.target), (None, None));
        assert_eq!(request("path add s1 ip:10.0.0.1@ip:10.0.0.2").names.len(), 2);
        assert_eq!(request("map disk0 from host ip:10.1.0.2 ro").names.len(), 5);
        assert!(request("unmap rnbd0 force").options.force);
        // A name may look like an option.
        assert_eq!(request("show json").names, ["json"]);
        for text in ["list --json", "show --json s1", "dump --json", "stats s1 --json"] {
            assert_eq!(request(text).options.format, Format::Json, "{text}");
        }
        assert_eq!(request("resize rnbd0 2 G").names, ["rnbd0", "2", "G"]);
        let forced = request("resize rnbd0 2G force");
        assert!(forced.options.force && forced.names == ["rnbd0", "2G"]);
        assert_eq!(request("tree --path class").names, request("tree class").names);
        assert_eq!(request("set class/x force").names, ["class/x", "force"]);
    }

    #[test]
    fn mistakes_are_invalid_arguments() {
        // tests [NB-41]
        for text in [
            "",
            "client",
            "eat",
            "list sessname,nonsense",
            "map disk0",
            "server map a from b",
            "client close x",
            "session unmap x",
            "show",
            "unmap a b",
            "client session disconnect s",
            "add s1",
            "device dump",
            "get",
            "set class/x",
            "tree a b",
            "session get x",
        ] {
            let refusal = parse(&arguments(text)).unwrap_err();
            assert_eq!(refusal.errno, 22, "{text}");
        }
    }

    #[test]
    fn what_does_not_fit_is_told_with_what_does() {
        // tests [NB-41]
        let refusal = |text: &str| parse(&arguments(text)).unwrap_err().to_string();
        assert_eq!(
            refusal("client session disconnect s1"),
            "there is no disconnect for client session; put one of these before the word: client path, server \
             session, server path"
        );
        assert_eq!(
            refusal("server map a from b"),
            "there is no map for server; put one of these before the word: client device"
        );
        assert_eq!(
            refusal("device dump"),
            "dump covers all devices, sessions and paths: leave out device"
        );
    }

    #[test]
    fn completion_offers_what_fits() {
        assert!(next(&[]).contains(&"client"));
        let client = next(&arguments("client"));
        assert!(
            client.contains(&"map") && !client.contains(&"close") && !client.contains(&"server")
        );
        assert_eq!(next(&arguments("map disk0")), ["from"]);
        assert!(next(&arguments("session policy s1")).contains(&"min-latency"));
        assert!(next(&arguments("list")).contains(&"xml"));
        let names = |text: &str| next_names(&arguments(text)).1;
        assert_eq!(names("map disk0 from"), [Target::Session]);
        assert_eq!(names("session show"), [Target::Session]);
        assert_eq!(names("path delete s1"), [Target::Path]);
        assert_eq!(names("unmap rnbd0"), []);
    }
}
