//! Where QMP messages end. What a message may be is `message.rs`'s, how long it may be
//! `protocol.rs`'s.

/// Where messages end: counts nesting outside strings.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cutter {
    depth: u32,
    string: bool,
    escape: bool,
}

pub(super) enum Cut {
    Between,
    Inside,
    End,
    Garbage,
}

impl Cutter {
    pub(super) fn byte(&mut self, b: u8) -> Cut {
        if self.string {
            match b {
                _ if self.escape => self.escape = false,
                b'\\' => self.escape = true,
                b'"' => self.string = false,
                _ => {}
            }
            return Cut::Inside;
        }
        match b {
            b'{' => self.depth += 1,
            b' ' | b'\t' | b'\r' | b'\n' if self.depth == 0 => return Cut::Between,
            _ if self.depth == 0 => return Cut::Garbage,
            b'[' => self.depth += 1,
            b'"' => self.string = true,
            b'}' | b']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Cut::End;
                }
            }
            _ => {}
        }
        Cut::Inside
    }
}
