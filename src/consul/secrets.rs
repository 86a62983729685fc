//! What goes along with a question and must not be shown, and what an answer may
//! repeat of it, as some proxies do. The body of an [`Answer`] is readable only
//! through here.

use std::{borrow::Cow, fmt, ops::Range};

use http02::HeaderMap;
use serde::{
    Deserializer,
    de::{DeserializeOwned, SeqAccess, Visitor},
};
use serde_json::Value;
use url::form_urlencoded;

use super::RegistryError;

/// How much of an answer's text an error shows.
const EXCERPT: usize = 300;

/// In what is gone by, as in the names of instances, secrets are hidden that are at
/// least so long. Our choice: no name is one of these by chance, and a user whose
/// password is the name of a host must still find that host.
const NO_NAME: usize = 12;

/// Of a text that was cut, an end is hidden with which so much of a secret begins.
const BEGINNING: usize = 4;

/// What stands in a secret's place.
const HIDDEN: &str = "(hidden)";

/// Secrets in all the forms in which they may be repeated, the longest first.
#[derive(Clone, Default)]
pub(super) struct Secrets(Vec<String>);

/// An answer of any status.
pub(super) struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Vec<u8>,
    /// The body came to its end.
    whole: bool,
    secrets: Secrets,
}

// === impl Secrets ===

impl Secrets {
    pub(super) fn of(secrets: impl IntoIterator<Item = String>) -> Self {
        let mut forms: Vec<_> = secrets.into_iter().flat_map(|it| forms(&it)).collect();
        forms.retain(|it| !it.is_empty());
        forms.sort_unstable_by(|one, other| (other.len(), other).cmp(&(one.len(), one)));
        forms.dedup();
        Self(forms)
    }

    /// `text` without any.
    pub(super) fn hidden<'a>(&self, text: &'a str) -> Cow<'a, str> {
        self.without(text, 0)
    }

    fn without<'a>(&self, text: &'a str, at_least: usize) -> Cow<'a, str> {
        let (mut shown, mut rest) = (String::new(), text);
        while let Some(found) = self.find(rest, at_least) {
            shown.push_str(&rest[..found.start]);
            shown.push_str(HIDDEN);
            rest = &rest[found.end..];
        }
        if rest.len() == text.len() {
            return Cow::Borrowed(text);
        }
        shown.push_str(rest);
        Cow::Owned(shown)
    }

    /// The first one, and of those that begin there the longest. Goes over the text
    /// once, since a long one may hold many.
    fn find(&self, text: &str, at_least: usize) -> Option<Range<usize>> {
        let bytes = text.as_bytes();
        let long = || self.0.iter().map(String::as_bytes).filter(|it| it.len() >= at_least);
        let mut begins = [false; 256];
        long().for_each(|it| begins[usize::from(it[0])] = true);
        let mut places = (0..bytes.len()).filter(|at| begins[usize::from(bytes[*at])]);
        places.find_map(|at| long().find(|it| bytes[at..].starts_with(it)).map(|it| at..at + it.len()))
    }

    /// `text`, which may have been cut within one.
    fn without_beginnings<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let begins = |it: &String| {
            let ends = (BEGINNING..it.len()).rev().filter(|end| it.is_char_boundary(*end));
            let found = ends.map(|end| &it[..end]).find(|begin| text.ends_with(begin));
            found.map(str::len)
        };
        match self.0.iter().filter_map(begins).max() {
            Some(length) => Cow::Owned(format!("{}{HIDDEN}", &text[..text.len() - length])),
            None => Cow::Borrowed(text),
        }
    }

    /// Hides in what is gone by what can be no name.
    fn hide_in(&self, value: &mut Value) {
        match value {
            Value::String(text) => {
                if let Cow::Owned(hidden) = self.without(text, NO_NAME) {
                    *text = hidden;
                }
            }
            Value::Array(list) => list.iter_mut().for_each(|it| self.hide_in(it)),
            Value::Object(map) => {
                *map = std::mem::take(map)
                    .into_iter()
                    .map(|(key, mut value)| {
                        self.hide_in(&mut value);
                        (self.without(&key, NO_NAME).into_owned(), value)
                    })
                    .collect();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    /// Whether a body may hold one that is no name: one is there, or an escape, behind
    /// which it may be.
    fn may_be_in(&self, body: &[u8]) -> bool {
        let long = self.0.iter().any(|it| it.len() >= NO_NAME);
        long && (body.contains(&b'\\') || self.find(&String::from_utf8_lossy(body), NO_NAME).is_some())
    }

    /// The beginning of `text`, fit for one line, without any.
    fn excerpt(&self, text: &str) -> String {
        let text = self.hidden(text);
        let text = text.trim();
        let mut short: String =
            text.chars().take(EXCERPT).map(|it| if it.is_control() { ' ' } else { it }).collect();
        if text.chars().nth(EXCERPT).is_some() {
            short.push('…');
        }
        short
    }
}

/// Shows none.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Secrets").finish_non_exhaustive()
    }
}

/// As it is; as an error, JSON, a URL or a page quotes it. The end of a base64, which
/// only fills it up, is none of it: some leave it out.
fn forms(secret: &str) -> Vec<String> {
    let secret = secret.trim_end_matches('=');
    let debug = format!("{secret:?}");
    let json = Value::from(secret).to_string();
    let inner = |it: &str| it[1..it.len() - 1].to_owned();
    let url: String = form_urlencoded::byte_serialize(secret.as_bytes()).collect();
    let page = secret.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    vec![
        inner(&debug),
        inner(&json).replace('/', "\\/"),
        inner(&json),
        url.replace('+', "%20"),
        url,
        page.replace('"', "&quot;").replace('\'', "&#39;"),
        page.replace('"', "&#34;").replace('\'', "&#39;"),
        page,
        secret.to_owned(),
    ]
}

// === impl Answer ===

impl Answer {
    pub(super) fn new(status: u16, headers: HeaderMap, body: Vec<u8>, whole: bool, secrets: Secrets) -> Self {
        Self { status, headers, body, whole, secrets }
    }

    pub(super) fn status(&self) -> u16 {
        self.status
    }

    /// A header that is a number.
    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.headers.get(name)?.to_str().ok()?.trim().parse().ok()
    }

    /// A header that is `true` or `false`.
    pub(super) fn flag(&self, name: &str) -> Option<bool> {
        self.headers.get(name)?.to_str().ok()?.trim().parse().ok()
    }

    /// The beginning of the body, to be told.
    pub(super) fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.body);
        if self.whole {
            self.told(&text)
        } else {
            // What was cut within a letter ends with the sign for that.
            self.told(&self.secrets.without_beginnings(text.trim_end_matches('\u{fffd}')))
        }
    }

    /// A part of the answer, to be told: cut short.
    pub(super) fn told(&self, text: &str) -> String {
        self.secrets.excerpt(text)
    }

    /// What is wrong with the answer; serde repeats what it did not expect, however long.
    pub(super) fn not_understood(&self, error: impl fmt::Display) -> RegistryError {
        RegistryError::not_understood(self.told(&error.to_string()))
    }

    /// The body.
    pub(super) fn json<T: DeserializeOwned>(&self) -> Result<T, RegistryError> {
        let read = |mut value: Value| {
            self.secrets.hide_in(&mut value);
            serde_json::from_value(value)
        };
        serde_json::from_slice(&self.body).and_then(read).map_err(|error| self.not_understood(error))
    }

    /// The body with nothing hidden, for what is only handed on and never shown.
    pub(super) fn exact<T: DeserializeOwned>(&self) -> Result<T, RegistryError> {
        serde_json::from_slice(&self.body).map_err(|error| self.not_understood(error))
    }

    /// The body as a list, one element after the other, so that a large one is never
    /// held as a tree. An error means that it is no list.
    pub(super) fn list(&self, what: &str, each: impl FnMut(Value)) -> Result<(), RegistryError> {
        let secrets = self.secrets.may_be_in(&self.body).then_some(&self.secrets);
        let mut json = serde_json::Deserializer::from_slice(&self.body);
        json.deserialize_seq(List { what, secrets, each })
            .and_then(|()| json.end())
            .map_err(|error| self.not_understood(error))
    }
}

/// The status alone.
impl fmt::Debug for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answer").field("status", &self.status).finish_non_exhaustive()
    }
}

struct List<'a, F> {
    what: &'a str,
    secrets: Option<&'a Secrets>,
    each: F,
}

impl<'de, F: FnMut(Value)> Visitor<'de> for List<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        while let Some(mut entry) = entries.next_element::<Value>()? {
            if let Some(secrets) = self.secrets {
                secrets.hide_in(&mut entry);
            }
            (self.each)(entry);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const TOKEN: &str = "0dd5ec2e-7a11-4f5e-9b1d-a1b2c3d4e5f6";

    fn answer(body: impl Into<Vec<u8>>, whole: bool, secrets: &[&str]) -> Answer {
        let secrets = Secrets::of(secrets.iter().map(|it| (*it).to_owned()));
        Answer::new(200, HeaderMap::new(), body.into(), whole, secrets)
    }

    proptest! {
        #[test]
        fn a_secret_is_shown_in_no_form_wherever_it_stands(
            secret in "[!-~]{12,20}",
            (before, after) in ("[\\x00-\\x7f]{0,20}", "[ -~]{0,20}"),
        ) {
            // What is around it must not be one by chance, or grow to be one.
            prop_assume!(!secret.contains("(hidden)") && !secret.ends_with('='));
            for form in forms(&secret) {
                let told = answer("", true, &[&secret]).told(&format!("{before}{form}{after}"));
                prop_assert!(told.contains(HIDDEN) || told.ends_with('…'), "{told}");
                prop_assert!(!told.contains(&form), "{told}");
            }
            let value = json!([{ "a": [format!("{before}{secret}{after}")], &secret: 1 }]);
            let mut seen = Vec::new();
            answer(value.to_string(), true, &[&secret]).list("a list", |it| seen.push(it)).unwrap();
            let seen = json!(seen).to_string();
            prop_assert!(seen.contains(HIDDEN) && !seen.contains(&secret), "{seen}");
        }

        #[test]
        fn a_text_that_is_cut_within_a_secret_shows_no_more_of_it_than_a_syllable(end in 0..TOKEN.len()) {
            let text = format!("refused: {}", &TOKEN[..end]);
            let told = answer(text, false, &[TOKEN]).text();
            prop_assert!(!told.contains(&TOKEN[..BEGINNING]), "{told}");
            prop_assert_eq!(told.contains(HIDDEN), end >= BEGINNING);
        }
    }

    #[test]
    fn a_password_that_is_a_name_hides_no_instance() {
        let list = answer(r#"["consul", "0dd5ec2e-7a11-4f5e-9b1d-a1b2c3d4e5f6"]"#, true, &["consul", TOKEN]);
        assert_eq!(list.json::<Vec<String>>().unwrap(), ["consul", HIDDEN]);
        assert_eq!(list.told("no consul"), "no (hidden)");
    }

    #[test]
    fn letters_behind_escapes_hide_no_secret() {
        let escaped: String = TOKEN.chars().map(|it| format!("\\u{:04x}", u32::from(it))).collect();
        let list = answer(format!("[\"{escaped}\"]"), true, &[TOKEN]);
        assert_eq!(list.json::<Vec<String>>().unwrap(), [HIDDEN]);
        list.list("a list", |it| assert_eq!(it, HIDDEN)).unwrap();
        let error = list.json::<u32>().unwrap_err();
        assert!(!format!("{error:?}").contains(TOKEN), "{error:?}");
    }
}
