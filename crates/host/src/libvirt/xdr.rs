//! XDR, the encoding of libvirt's messages: big-endian, each item a multiple of four bytes.
//! Source: RFC 4506.
//!
//! What is decoded comes from a peer. A length is compared with what is there before anything is
//! allocated, and text may be any bytes.

/// Most bytes of one text. Source: `REMOTE_STRING_MAX` is 4 MiB in libvirt; the longest that
/// Ebb asks for is a domain's description.
const MAX_TEXT: usize = 4 << 20;

/// A message that does not hold what its procedure says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message ends early or has an impossible length")]
pub struct Malformed;

#[derive(Debug, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    pub fn u32(mut self, n: u32) -> Writer {
        self.0.extend(n.to_be_bytes());
        self
    }

    pub fn i32(self, n: i32) -> Writer {
        self.u32(n.cast_unsigned())
    }

    pub fn u64(mut self, n: u64) -> Writer {
        self.0.extend(n.to_be_bytes());
        self
    }

    /// `opaque` of a length that both sides know, a multiple of four.
    pub fn fixed(mut self, bytes: &[u8]) -> Writer {
        self.0.extend(bytes);
        self
    }

    /// A `string`, shorter than 4 GiB.
    pub fn text(self, text: &str) -> Writer {
        let mut w = self.u32(text.len() as u32).fixed(text.as_bytes());
        w.0.resize(w.0.len().next_multiple_of(4), 0);
        w
    }

    /// A `string` that may be absent, and is there.
    pub fn some_text(self, text: &str) -> Writer {
        self.u32(1).text(text)
    }

    pub fn done(self) -> Vec<u8> {
        self.0
    }
}

/// What is left of what came.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn fixed(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (taken, left) = self.0.split_at_checked(n).ok_or(Malformed)?;
        self.0 = left;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        self.fixed(N)?.try_into().map_err(|_| Malformed)
    }

    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_be_bytes(self.array()?))
    }

    /// An `int`, or an `enum`.
    pub fn i32(&mut self) -> Result<i32, Malformed> {
        Ok(i32::from_be_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_be_bytes(self.array()?))
    }

    /// A `string`; bytes that are not UTF-8 are replaced.
    pub fn text(&mut self) -> Result<String, Malformed> {
        let n = self.u32()? as usize;
        if n > MAX_TEXT {
            return Err(Malformed);
        }
        let bytes = self.fixed(n)?;
        self.fixed(n.next_multiple_of(4) - n)?;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    /// A `string` that may be absent.
    pub fn maybe_text(&mut self) -> Result<Option<String>, Malformed> {
        Ok(if self.u32()? == 0 { None } else { Some(self.text()?) })
    }

    /// Any number of items, each of four bytes at least.
    pub fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let n = self.u32()? as usize;
        if n > self.0.len() / 4 {
            return Err(Malformed);
        }
        (0..n).map(|_| item(self)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read() {
        let bytes = Writer::default().u32(7).i32(-2).u64(u64::MAX).text("abcde").some_text("é");
        let bytes = bytes.u32(2).i32(1).i32(2).done();
        assert_eq!(bytes.len() % 4, 0);
        let mut r = Reader(&bytes);
        assert_eq!((r.u32(), r.i32(), r.u64()), (Ok(7), Ok(-2), Ok(u64::MAX)));
        assert_eq!(r.text().as_deref(), Ok("abcde"));
        assert_eq!(r.maybe_text(), Ok(Some("é".into())));
        assert_eq!(r.list(Reader::i32), Ok(vec![1, 2]));
        assert_eq!((r.0, r.u32()), (&[][..], Err(Malformed)));
    }

    #[test]
    fn a_length_that_cannot_be_allocates_nothing() {
        let huge = u32::MAX.to_be_bytes();
        assert_eq!(Reader(&huge).text(), Err(Malformed));
        assert_eq!(Reader(&huge).list(Reader::u32), Err(Malformed));
        assert_eq!(Reader(&[0, 0, 0, 3, b'a', b'b', b'c']).text(), Err(Malformed), "no padding");
    }
}
