//! Whether polling can pay at all.

/// Tells whether the machine has only one processor: there a polling thread keeps the thread it
/// waits for from running. A restriction of this process to one processor does not matter: its
/// peers may have others.
pub fn has_one_processor() -> bool {
    match std::fs::read_to_string("/sys/devices/system/cpu/online") {
        Ok(list) => list.trim().parse::<u32>().is_ok(), // several are a range or a list
        Err(_) => std::thread::available_parallelism().is_ok_and(|n| n.get() == 1),
    }
}
