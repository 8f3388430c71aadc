//! What a domain's XML says of its balloon.
//!
//! Whoever may define the domain wrote the XML. libvirt has checked all of it but the metadata,
//! which `metadata.rs` reads.

use serde_json::{Value, json};

use crate::qmp_balloon::{DEFLATE_ON_OOM, INTERVAL, REPORTING};

/// Most elements read of one description.
const MOST_NODES: u32 = 50_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balloon {
    /// Its device's name in QEMU.
    pub alias: String,
    reporting: bool,
    deflate_on_oom: bool,
    /// Seconds between QEMU's questions to the guest; 0: none.
    pub period: u64,
}

impl Balloon {
    /// The balloon in a description; `None`: the domain has none that Ebb may set.
    pub fn of(xml: &str) -> Result<Option<Balloon>, String> {
        let options = roxmltree::ParsingOptions { nodes_limit: MOST_NODES, ..Default::default() };
        let all = roxmltree::Document::parse_with_options(xml, options);
        let all = all.map_err(|e| format!("its description is no XML that Ebb reads: {e}"))?;
        let is = |n: &roxmltree::Node<'_, '_>| {
            n.has_tag_name("memballoon") && n.parent().is_some_and(|p| p.has_tag_name("devices"))
        };
        let Some(balloon) = all.descendants().find(is) else { return Ok(None) };
        // libvirt counts memory of virtio-mem sometimes in a domain's size and sometimes not.
        let plugged = |n: &roxmltree::Node<'_, '_>| {
            n.has_tag_name("memory") && n.attribute("model") == Some("virtio-mem")
        };
        if all.descendants().any(|n| plugged(&n)) {
            return Ok(None);
        }
        if !balloon.attribute("model").is_some_and(|m| m.starts_with("virtio")) {
            return Ok(None);
        }
        let child = |name| balloon.children().find(move |c| c.has_tag_name(name));
        let alias = child("alias").and_then(|a| a.attribute("name")).unwrap_or("balloon0");
        let period = child("stats").and_then(|s| s.attribute("period")?.parse().ok());
        Ok(Some(Balloon {
            alias: alias.to_owned(),
            reporting: balloon.attribute("freePageReporting") == Some("on"),
            deflate_on_oom: balloon.attribute("autodeflate") == Some("on"),
            period: period.unwrap_or(0),
        }))
    }

    /// A property of the device, as QEMU would tell it.
    pub fn property(&self, name: &str) -> Option<Value> {
        match name {
            REPORTING => Some(json!(self.reporting)),
            DEFLATE_ON_OOM => Some(json!(self.deflate_on_oom)),
            INTERVAL => Some(json!(self.period)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(balloon: &str) -> String {
        format!("<domain type='kvm'><name>a</name><devices><disk/>{balloon}</devices></domain>")
    }

    #[test]
    fn a_balloon_is_what_its_element_says() {
        let xml = domain(
            "<memballoon model='virtio-transitional' autodeflate='on' freePageReporting='on'>\
             <stats period='5'/><alias name='ua-b'/></memballoon>",
        );
        let b = Balloon::of(&xml).unwrap().unwrap();
        assert_eq!((b.alias.as_str(), b.period), ("ua-b", 5));
        assert_eq!(b.property(REPORTING), Some(json!(true)));
        assert_eq!(b.property(DEFLATE_ON_OOM), Some(json!(true)));
        let b = Balloon::of(&domain("<memballoon model='virtio'/>")).unwrap().unwrap();
        assert_eq!((b.alias.as_str(), b.property(INTERVAL)), ("balloon0", Some(json!(0))));
        assert_eq!(b.property(DEFLATE_ON_OOM), Some(json!(false)));
        assert_eq!(Balloon::of(&domain("<memballoon model='none'/>")), Ok(None));
        assert_eq!(Balloon::of(&domain("")), Ok(None));
        let two = domain("<memory model='virtio-mem'/><memballoon model='virtio'/>");
        assert_eq!(Balloon::of(&two), Ok(None));
        assert!(Balloon::of("<domain>").is_err());
        assert!(Balloon::of(&"<a>".repeat(100_000)).is_err(), "bounded");
    }
}
