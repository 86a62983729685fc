//! The part of Consul's filter language that is used here: `==` on a service's
//! metadata, `in` and `contains` on its tags, joined by `and`.
//! <https://developer.hashicorp.com/consul/api-docs/features/filtering>

use std::collections::BTreeMap;

/// A filter; all of its terms must hold.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Filter(Vec<Term>);

#[derive(Debug, PartialEq, Eq)]
enum Term {
    Meta { key: String, value: String },
    Tag(String),
}

#[derive(Debug, PartialEq, Eq)]
enum Token {
    /// An identifier, with the dots and indexes that follow it resolved.
    Path(Vec<String>),
    /// A number or something in quotes.
    Literal(String),
    Equals,
}

// === impl Filter ===

impl Filter {
    /// Reads `text`; none is a filter that everything passes. What real Consul
    /// refuses, and what it would take but this one does not know, is refused.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self::default());
        }
        let refuse = |why: String| format!("Failed to create boolean expression evaluator: {why}");
        let tokens = tokens(text).map_err(refuse)?;
        let is_and = |token: &Token| matches!(token, Token::Path(path) if path == &["and"]);
        tokens.split(is_and).map(Term::read).collect::<Result<_, _>>().map(Self).map_err(refuse)
    }

    pub(crate) fn matches(&self, tags: &[String], meta: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|term| match term {
            Term::Meta { key, value } => meta.get(key) == Some(value),
            Term::Tag(tag) => tags.contains(tag),
        })
    }
}

// === impl Term ===

impl Term {
    fn read(tokens: &[Token]) -> Result<Self, String> {
        match tokens {
            [Token::Path(path), Token::Equals, value] => match path.as_slice() {
                [service, meta, key] if service == "Service" && meta == "Meta" => {
                    Ok(Self::Meta { key: key.clone(), value: value.text()? })
                }
                _ => Err(format!("Selector {:?} is not valid", path.join("."))),
            },
            [tag, Token::Path(verb), Token::Path(path)] if verb == &["in"] => Self::tag(tag, path),
            [Token::Path(path), Token::Path(verb), tag] if verb == &["contains"] => Self::tag(tag, path),
            _ => Err("no match found".to_owned()),
        }
    }

    fn tag(tag: &Token, path: &[String]) -> Result<Self, String> {
        if path == ["Service", "Tags"] {
            Ok(Self::Tag(tag.text()?))
        } else {
            Err(format!("Selector {:?} is not valid", path.join(".")))
        }
    }
}

// === impl Token ===

impl Token {
    fn text(&self) -> Result<String, String> {
        match self {
            Self::Path(path) => Ok(path.join(".")),
            Self::Literal(text) => Ok(text.clone()),
            Self::Equals => Err("no match found".to_owned()),
        }
    }
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut found = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let (token, after) = match first {
            '"' | '`' => quoted(rest)?,
            '=' => (Token::Equals, rest.strip_prefix("==").ok_or("no match found, expected: \"==\"")?),
            '-' | '0'..='9' => number(rest)?,
            'a'..='z' | 'A'..='Z' => path(rest)?,
            other => return Err(format!("no match found at {other:?}")),
        };
        // Two words must not touch.
        if token != Token::Equals && !(after.is_empty() || after.starts_with([' ', '\t', '\r', '\n', '='])) {
            return Err(format!("no match found at {after:?}"));
        }
        found.push(token);
        rest = after.trim_start();
    }
    Ok(found)
}

fn quoted(text: &str) -> Result<(Token, &str), String> {
    let inside = ['"', '`'].into_iter().find_map(|quote| text.strip_prefix(quote)?.split_once(quote));
    let (inside, after) = inside.ok_or("Unterminated string literal")?;
    Ok((Token::Literal(inside.to_owned()), after))
}

fn number(text: &str) -> Result<(Token, &str), String> {
    let end = text.find(|it: char| !(it.is_ascii_alphanumeric() || "-._".contains(it))).unwrap_or(text.len());
    let (number, after) = text.split_at(end);
    let digits = number.strip_prefix('-').unwrap_or(number);
    let whole = digits.split('.').next().unwrap_or_default();
    let plain = digits.chars().all(|it| it.is_ascii_digit() || it == '.');
    if !plain || whole.is_empty() || (whole.len() > 1 && whole.starts_with('0')) {
        return Err("rule \"number\": Invalid number literal".to_owned());
    }
    Ok((Token::Literal(number.to_owned()), after))
}

fn path(text: &str) -> Result<(Token, &str), String> {
    let mut parts = Vec::new();
    let mut rest = text;
    loop {
        let end = rest.find(|it: char| !(it.is_ascii_alphanumeric() || it == '_')).unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        if !part.starts_with(|it: char| it.is_ascii_alphabetic()) {
            return Err("no match found, expected: [a-zA-Z]".to_owned());
        }
        parts.push(part.to_owned());
        rest = after;
        while let Some(inside) = rest.strip_prefix('[') {
            let (Token::Literal(key), after) = quoted(inside).map_err(|_| "rule \"index\": Invalid index")?
            else {
                return Err("rule \"index\": Invalid index".to_owned());
            };
            rest = after.strip_prefix(']').ok_or("rule \"index\": Unclosed index expression")?;
            parts.push(key);
        }
        match rest.strip_prefix('.') {
            Some(after) => rest = after,
            None => return Ok((Token::Path(parts), rest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn passes(filter: &str) -> Result<bool, String> {
        let meta = [("k", "v-1"), ("n", "1")].map(|(key, value)| (key.to_owned(), value.to_owned()));
        let tags = ["v-1", "2", "x.y", "V"].map(str::to_owned);
        Ok(Filter::parse(filter)?.matches(&tags, &meta.into()))
    }

    proptest! {
        #[test]
        fn any_text_is_a_filter_or_refused(
            text in ".{0,30}|(Service|Tags|Meta|in|contains|and|==|[a-c\"`\\[\\]. é0-9-]){0,16}",
        ) {
            let _ = passes(&text);
        }
    }

    // What each of them gives is what Consul 1.8.7 gave; see `tests/conformance.rs`
    // for those that both are asked.
    #[test]
    fn filters_choose_by_metadata_and_tags() {
        for filter in [
            r#"Service.Meta["k"] == "v-1""#,
            "Service.Meta.k==`v-1`",
            "Service.Meta.n == 1",
            "2 in Service.Tags",
            "Service.Tags contains 2",
            r#""v-1" in Service.Tags"#,
            "x.y in Service.Tags",
            r#" Service.Meta["k"] == "v-1" and "2" in Service.Tags and V in Service.Tags "#,
            "",
        ] {
            assert_eq!(passes(filter), Ok(true), "{filter}");
        }
        for filter in [r#"Service.Meta["nope"] == x"#, "v in Service.Tags", r#"Service.Meta["k"] == """#] {
            assert_eq!(passes(filter), Ok(false), "{filter}");
        }
    }

    #[test]
    fn bad_filters_are_refused() {
        for filter in [
            "xyz",
            " ",
            "Service.Nope == x",
            r#"Service.Meta["k"] == v-1"#,
            "v-1 in Service.Tags",
            r#"Service.Meta["k"]=="v-1"and"2" in Service.Tags"#,
            r#"Service.Meta["k"]=="v-1" AND "2" in Service.Tags"#,
            "service.tags contains 2",
            r#"Service.Meta[k] == "v-1""#,
            "2 IN Service.Tags",
            "2in Service.Tags",
            "Service.Tags contains 01",
            "_x in Service.Tags",
            r#"Service.Meta["k"] == v and"#,
            "and",
            "==",
            "\"open",
            "é in Service.Tags",
            "Service.Meta[é] == x",
            "Service.Meta[",
            r#"Service.Meta["k" == x"#,
            "Service.Tags contains `é",
        ] {
            let refused = passes(filter).expect_err(filter);
            assert!(refused.starts_with("Failed to create boolean expression evaluator: "), "{refused}");
        }
    }
}
