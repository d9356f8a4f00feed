//! Which C library a program is linked with: the one whose library `bowline run` has to preload.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    os::unix::{ffi::OsStrExt, fs::FileExt},
    path::{Path, PathBuf},
};

/// Bytes of a program that are looked at for what it is.
const START: u64 = 4096;
/// Longest path of an interpreter, bytes.
const PATH_MAX: usize = 4096;
/// Scripts whose interpreter is a script again; the kernel follows as many.
const SCRIPTS_MAX: usize = 5;

/// What loads the libraries of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Libc {
    /// Nothing: the program is linked statically.
    None,
    Musl,
    /// That of glibc, or what is not known.
    Other,
}

/// Finds out about a program, or the interpreter of a script.
pub(super) fn of(program: &Path) -> io::Result<Libc> {
    let mut program = program.to_owned();
    for _ in 0..SCRIPTS_MAX {
        let file = File::open(&program)?;
        let mut start = Vec::new();
        (&file).take(START).read_to_end(&mut start)?;
        match script(&start) {
            Some(next) => program = next,
            None => {
                let libc = from_binary(&file, &start);
                return Ok(if libc == Libc::None { from_name(&program) } else { libc });
            }
        }
    }
    Ok(Libc::Other)
}

/// The C library of a program that names no loader: one that is a loader itself, as
/// `ld-linux-x86-64.so.2 PROGRAM`, loads what it is given.
fn from_name(program: &Path) -> Libc {
    let begins = |text: &str| {
        let name = program.file_name().unwrap_or_default();
        name.as_bytes().starts_with(text.as_bytes())
    };
    if begins("ld-musl-") {
        Libc::Musl
    } else if begins("ld-linux") || begins("ld.so") || begins("ld64.so") {
        Libc::Other
    } else {
        Libc::None
    }
}

/// The interpreter that a script names.
fn script(start: &[u8]) -> Option<PathBuf> {
    let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let path = line.split(u8::is_ascii_whitespace).find(|word| !word.is_empty())?;
    Some(OsStr::from_bytes(path).into())
}

/// Looks for the interpreter that a 64-bit ELF program names.
fn from_binary(file: &File, start: &[u8]) -> Libc {
    const PT_INTERP: u32 = 3;
    if !start.starts_with(b"\x7fELF\x02") {
        return Libc::Other;
    }
    let bytes = |at: usize, len: usize| start.get(at..at.checked_add(len)?);
    let half = |at| bytes(at, 2).and_then(|b| b.try_into().ok()).map(u16::from_ne_bytes);
    let word = |at| bytes(at, 4).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
    let long = |at| bytes(at, 8).and_then(|b| b.try_into().ok()).map(u64::from_ne_bytes);
    let (Some(offset), Some(size), Some(count)) = (long(32), half(54), half(56)) else {
        return Libc::Other;
    };
    let Ok(offset) = usize::try_from(offset) else { return Libc::Other };
    for n in 0..usize::from(count) {
        let at = offset.saturating_add(n * usize::from(size));
        // A program header table outside the bytes read proves nothing.
        let Some(kind) = word(at) else { return Libc::Other };
        if kind == PT_INTERP {
            let place = long(at + 8).zip(long(at + 32));
            return place.map_or(Libc::Other, |(offset, len)| of_loader(file, offset, len));
        }
    }
    Libc::None
}

/// The C library whose loader has its path at this place of a file.
fn of_loader(file: &File, offset: u64, len: u64) -> Libc {
    let mut path = vec![0; usize::try_from(len).unwrap_or(PATH_MAX).min(PATH_MAX)];
    let is_musl = file.read_exact_at(&mut path, offset).is_ok()
        && Path::new(OsStr::from_bytes(&path))
            .file_name()
            .is_some_and(|name| name.as_bytes().starts_with(b"ld-musl-"));
    if is_musl { Libc::Musl } else { Libc::Other }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program with segments of some kinds, each of which says that it is a loader's path.
    fn elf(kinds: &[u32], loader: &str) -> Vec<u8> {
        let mut file = vec![0; 64];
        file[..5].copy_from_slice(b"\x7fELF\x02");
        file[32..40].copy_from_slice(&64u64.to_ne_bytes());
        file[54..56].copy_from_slice(&56u16.to_ne_bytes());
        file[56..58].copy_from_slice(&(kinds.len() as u16).to_ne_bytes());
        let end = 64 + 56 * kinds.len() as u64;
        for kind in kinds {
            let mut segment = [0; 56];
            segment[..4].copy_from_slice(&kind.to_ne_bytes());
            segment[8..16].copy_from_slice(&end.to_ne_bytes());
            segment[32..40].copy_from_slice(&(loader.len() as u64 + 1).to_ne_bytes());
            file.extend(segment);
        }
        file.extend(loader.as_bytes());
        file.push(0);
        file
    }

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let place = std::env::temp_dir().join(format!("bowline-{name}-{}", std::process::id()));
            std::fs::create_dir(&place).unwrap();
            Self(place)
        }

        fn libc_of(&self, file: &[u8]) -> Libc {
            let place = self.0.join("program");
            std::fs::write(&place, file).unwrap();
            of(&place).unwrap()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_loader_loads_what_it_is_given() {
        let folder = Folder::new("loader");
        let name = |name: &str| {
            std::fs::write(folder.0.join(name), elf(&[1, 2], "")).unwrap();
            of(&folder.0.join(name)).unwrap()
        };
        assert_eq!(name("ld-linux-x86-64.so.2"), Libc::Other);
        assert_eq!(name("ld-musl-x86_64.so.1"), Libc::Musl);
        assert_eq!(name("program"), Libc::None);
    }

    #[test]
    fn programs_without_an_interpreter_are_static() {
        let folder = Folder::new("static");
        assert_eq!(folder.libc_of(&elf(&[1, 2], "/lib/ld-musl-x86_64.so.1")), Libc::None);
        let glibc = elf(&[6, 3, 1], "/lib64/ld-linux-x86-64.so.2");
        assert_eq!(folder.libc_of(&glibc), Libc::Other);
        assert_eq!(folder.libc_of(&elf(&[1, 2], "")[..100]), Libc::Other, "not all there");
        assert_eq!(folder.libc_of(b""), Libc::Other);
    }

    #[test]
    fn programs_and_scripts_of_musl_are_known_by_their_loader() {
        let folder = Folder::new("musl");
        let musl = elf(&[6, 3, 1], "/lib/ld-musl-x86_64.so.1");
        assert_eq!(folder.libc_of(&musl), Libc::Musl);
        assert_eq!(folder.libc_of(&musl[..musl.len() - 3]), Libc::Other, "the path is not there");
        let shell = folder.0.join("shell");
        std::fs::write(&shell, musl).unwrap();
        let script = format!("#! {} -e\nexit\n", shell.display());
        assert_eq!(folder.libc_of(script.as_bytes()), Libc::Musl);
        let itself = format!("#!{}", folder.0.join("program").display());
        assert_eq!(folder.libc_of(itself.as_bytes()), Libc::Other);
        std::fs::write(folder.0.join("program"), "#!/nonexistent/interpreter").unwrap();
        assert!(of(&folder.0.join("program")).is_err());
    }
}
