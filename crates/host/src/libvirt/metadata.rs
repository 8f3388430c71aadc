//! A domain's metadata: the element that sets something for Ebb, and the note in which Ebb says
//! what the balloon holds without it. The note goes along when the domain is saved or migrated.
//!
//! The user who defines the domain writes metadata, and libvirt checks only that it is XML.
//! `roxmltree` refuses a DTD, so no entities are expanded; length and number of nodes are bounded.

use ebb_core::config::{Metadata, NAMESPACE, Overrides};
use ebb_core::text::{in_command, printable};
use ebb_core::units::Bytes;

use super::calls;
use super::rpc::Refused;

/// What a problem with metadata has as its source.
pub const METADATA: &str = "libvirt metadata";
/// Namespace and prefix of the note.
pub(super) const NOTE: (&str, &str) = ("urn:ebb:balloon:1", "ebb-balloon");
/// Longest element that is read, bytes.
const MAX_TEXT: usize = 16 << 10;
const MOST_NODES: u32 = 100;
/// `VIR_ERR_NO_DOMAIN_METADATA`.
const NO_METADATA: i32 = 80;
/// Most characters of an element's name that a message repeats.
const MAX_NAME: usize = 40;

fn parse(xml: &str) -> Result<roxmltree::Document<'_>, String> {
    if xml.len() > MAX_TEXT {
        return Err(format!("it is longer than {} KiB", MAX_TEXT >> 10));
    }
    let options = roxmltree::ParsingOptions { nodes_limit: MOST_NODES, ..Default::default() };
    let all = roxmltree::Document::parse_with_options(xml, options);
    all.map_err(|e| format!("it is no XML that Ebb reads: {}", printable(&e.to_string(), MAX_NAME)))
}

/// What the element says: `<memory min='512MiB'/>`.
pub fn settings(xml: &str) -> Result<Overrides, String> {
    let all = parse(xml)?;
    let element = all.root_element();
    let name = |n: roxmltree::Node<'_, '_>| printable(n.tag_name().name(), MAX_NAME);
    let is_ours = element.tag_name().namespace().is_none_or(|uri| uri == NAMESPACE);
    if element.tag_name().name() != "memory" || !is_ours {
        return Err(format!("element {} is not <memory>", name(element)));
    }
    if let Some(inner) = element.children().find(roxmltree::Node::is_element) {
        return Err(format!("element {} in <memory>: settings are attributes", name(inner)));
    }
    Overrides::read(element.attributes().map(|a| (a.name(), a.value())))
}

/// The note that the balloon holds this much without Ebb.
pub(super) fn note(others: Bytes) -> String {
    format!("<balloon unit='KiB' others='{}'/>", others.0 >> 10)
}

/// What a note says. One that cannot be read says nothing: the size is then the operator's.
pub fn noted(xml: &str) -> Option<Bytes> {
    let all = parse(xml).ok()?;
    let element = all.root_element();
    let its = |name: &str| element.attributes().find(|a| a.name() == name).map(|a| a.value());
    if element.tag_name().name() != "balloon" || its("unit") != Some("KiB") {
        return None;
    }
    its("others")?.parse::<u64>().ok()?.checked_mul(1 << 10).map(Bytes)
}

/// The element in libvirt's answer, if there is one; an error is for people.
pub(super) fn element(answer: Result<Vec<u8>, Refused>) -> Result<Option<String>, String> {
    match answer {
        Ok(answer) => calls::text(&answer).map(Some).map_err(calls::bad_answer),
        Err(e) if e.code == NO_METADATA => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

/// What a domain's element says.
pub(super) fn said(domain: &str, element: &str) -> Metadata {
    match settings(element) {
        Ok(its) if its.is_empty() => Metadata::None,
        Ok(its) => Metadata::Says(its),
        Err(why) => Metadata::Wrong(wrong(domain, &why)),
    }
}

fn wrong(domain: &str, why: &str) -> String {
    let name = in_command(domain);
    format!(
        "the libvirt metadata of domain “{}” is wrong: {why}; Ebb leaves the domain alone until \
         that is corrected: virsh metadata {name} --uri {NAMESPACE} shows it, and replaces all of \
         it with --key ebb --set \"<memory …/>\" --live --config",
        printable(domain, MAX_NAME)
    )
}

#[cfg(test)]
mod tests {
    use ebb_core::config::Amount;
    use ebb_core::units::Bytes;
    use proptest::prelude::*;

    use super::super::xdr::Writer;
    use super::*;

    #[test]
    fn the_element_is_read_with_and_without_its_namespace() {
        let expected = Overrides {
            min: Some(Amount::Bytes(Bytes::mib(128))),
            manage: Some(true),
            ..Overrides::default()
        };
        for xml in [
            "<memory min='128MiB' manage=\"yes\"/>",
            "<?xml version='1.0'?><ebb:memory xmlns:ebb='urn:ebb:domain:1' min='128MiB' manage='yes'/>",
            "<memory xmlns='urn:ebb:domain:1' min=' 128 MiB ' manage='yes'>\n<!-- why -->\n</memory>",
        ] {
            assert_eq!(settings(xml).as_ref(), Ok(&expected), "{xml}");
        }
        assert_eq!(settings("<memory/>"), Ok(Overrides::default()));
    }

    #[test]
    fn what_is_hostile_or_not_ours_is_refused() {
        let bomb = "<!DOCTYPE m [<!ENTITY a \"aaaaaaaa\"><!ENTITY b \"&a;&a;&a;\">]>\
                    <memory group='&b;'/>";
        let file = "<!DOCTYPE m [<!ENTITY a SYSTEM \"file:///etc/shadow\">]><memory group='&a;'/>";
        for xml in [
            bomb,
            file,
            "",
            "<memory",
            "<memory min='1GiB' min='2GiB'/>",
            "<memory group='&a;'/>",
            "<currentMemory/>",
            "<memory xmlns='urn:other'/>",
            "<memory><min>1GiB</min></memory>",
            &"<memory>".repeat(1000),
            &format!("<memory group='{}'/>", "a".repeat(20_000)),
            &format!("<memory>{}</memory>", "<!---->".repeat(1000)),
        ] {
            assert!(settings(xml).is_err(), "{xml}");
        }
    }

    #[test]
    fn a_note_says_what_was_written_and_one_of_others_nothing() {
        for others in [Bytes::ZERO, Bytes::mib(353), Bytes::gib(1 << 20)] {
            assert_eq!(noted(&note(others)), Some(others));
        }
        for xml in [
            "",
            "<balloon unit='KiB'/>",
            "<balloon others='1'/>",
            "<balloon unit='MiB' others='1'/>",
            "<balloon unit='KiB' others='-1'/>",
            "<balloon unit='KiB' others='18446744073709551615'/>",
            "<memory unit='KiB' others='1'/>",
        ] {
            assert_eq!(noted(xml), None, "{xml}");
        }
    }

    #[test]
    fn what_is_wrong_is_said_with_domain_attribute_and_command() {
        let text = |xml: &str| Ok(Writer::default().text(xml).done());
        let of = |domain, xml| match said(domain, &element(text(xml)).unwrap().unwrap()) {
            Metadata::Wrong(why) => why,
            other => panic!("{other:?}"),
        };
        let why = of("tame", "<memory weight='heavy'/>");
        assert!(why.contains("domain “tame” is wrong: attribute weight: “heavy” is not"), "{why}");
        assert!(why.contains("virsh metadata tame --uri urn:ebb:domain:1 shows it"), "{why}");
        let why = of("a;reboot", "<memory weight='heavy'/>");
        assert!(why.contains("virsh metadata NAME --uri"), "{why}");
        let none = Refused { code: NO_METADATA, message: "none".into() };
        assert_eq!(element(Err(none)), Ok(None));
        let denied = Refused { code: 88, message: "access denied".into() };
        assert_eq!(element(Err(denied)), Err("access denied".into()));
        assert!(element(Ok(vec![0, 0, 0, 9])).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_in_few_words(text in "(<(ebb:)?memory( xmlns:ebb='urn:ebb:domain:1')?)?.{0,100}/?>?") {
            let _ = noted(&text);
            if let Err(why) = settings(&text) {
                prop_assert!(why.len() < 800 && !why.contains('\n'), "{why}");
            }
        }
    }
}
