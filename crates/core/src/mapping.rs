//! A line of `/proc/PID/maps` (proc(5)): daemon and agent read it alike.

/// A mapping of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping<'a> {
    pub start: u64,
    /// The address after the last.
    pub end: u64,
    /// As in `rw-p`.
    pub permissions: &'a str,
    /// Into the file, bytes.
    pub offset: u64,
    /// Of the file: major and minor number.
    pub device: (u32, u32),
    /// Of the file; 0: none.
    pub inode: u64,
    /// The file, or what the kernel calls the memory; may be empty.
    pub path: &'a str,
}

impl Mapping<'_> {
    /// `START-END PERMISSIONS OFFSET DEVICE INODE PATH`; `None` for anything else.
    pub fn parse(line: &str) -> Option<Mapping<'_>> {
        let mut fields = line.splitn(6, ' ');
        let hex = |t| u64::from_str_radix(t, 16).ok();
        let (start, end) = fields.next()?.split_once('-')?;
        let (permissions, offset) = (fields.next()?, hex(fields.next()?)?);
        let (major, minor) = fields.next()?.split_once(':')?;
        Some(Mapping {
            start: hex(start)?,
            end: hex(end)?,
            permissions,
            offset,
            device: (hex(major)? as u32, hex(minor)? as u32),
            inode: fields.next()?.parse().ok()?,
            path: fields.next().unwrap_or_default().trim(),
        })
    }

    /// Its process may read and write it.
    pub fn is_writable(&self) -> bool {
        self.permissions.starts_with("rw")
    }

    pub fn is_shared(&self) -> bool {
        self.permissions.ends_with('s')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_and_anything_else_is_none() {
        let line = "7f0000000000-7f0000200000 rw-s 00001000 00:01 77         /memfd:a b (deleted)";
        let m = Mapping::parse(line).unwrap();
        assert_eq!((m.start, m.end, m.offset), (0x7f00_0000_0000, 0x7f00_0020_0000, 0x1000));
        assert_eq!((m.device, m.inode, m.path), ((0, 1), 77, "/memfd:a b (deleted)"));
        assert!(m.is_writable() && m.is_shared());
        let m = Mapping::parse("1000-2000 r--p 00000000 00:00 0 ").unwrap();
        assert!(!m.is_writable() && !m.is_shared() && m.path.is_empty());
        for bad in ["", "nonsense", "1000-2000", "1000-2000 rw-p x 00:00 0", "1000 rw-p 0 00:00 0"]
        {
            assert_eq!(Mapping::parse(bad), None, "{bad}");
        }
    }
}
