//! What calls cost that have nothing to do with RDS, in a program that is preloaded for it.

use std::io::{Read, Write};

use crate::role::{Role, done, stopping};

/// Writes to a pipe and reads it, over and over; each call counts.
pub(super) fn write_and_read(mut role: Role) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("pipe: {error}");
    let (mut reader, mut writer) = std::io::pipe().map_err(failed)?;
    role.ready("")?;
    let mut buf = vec![0; role.cell.size];
    let mut meter = role.meter();
    while !stopping() {
        writer.write_all(&buf).map_err(failed)?;
        reader.read_exact(&mut buf).map_err(failed)?;
        meter.add(2);
    }
    Ok(())
}

/// The other side has nothing to do.
pub(super) fn nothing(mut role: Role) -> Result<(), String> {
    role.ready("")?;
    while !stopping() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    done(0, 0);
    Ok(())
}
