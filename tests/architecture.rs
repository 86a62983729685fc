//! The modules' rules, held to by reading the sources: who may name whom.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A module, and the parts of this crate that it may name.
const MAY_NAME: &[(&str, &[&str])] = &[
    ("instance.rs", &["client"]), // in a doc link
    ("role.rs", &["instance"]),
    ("not_primary.rs", &["instance", "role"]),
    ("consul", &["consul", "instance", "Instance", "InstanceId", "Snapshot"]),
    (
        "client",
        &[
            "client",
            "consul",
            "instance",
            "FencingToken",
            "Instance",
            "InstanceId",
            "NotPrimary",
            "Primary",
            "PrimaryLost",
            "Snapshot",
        ],
    ),
    (
        "server",
        &[
            "server",
            "consul",
            "instance",
            "not_primary",
            "role",
            "InstanceId",
            "FencingToken",
            "NotPrimary",
            "Primary",
            "PrimaryLost",
            "Role",
        ],
    ),
    // It speaks the wire protocol, so that it cannot share a misreading.
    ("testkit", &["testkit"]),
    (
        "demo",
        &[
            "demo",
            "client",
            "server",
            "consul",
            "testkit",
            "Instance",
            "InstanceId",
            "FencingToken",
            "Primary",
            "Role",
        ],
    ),
];

/// Crates that only these modules may name.
const FENCED: &[(&str, &[&str])] = &[
    ("consulrs", &["consul"]),
    ("rustify", &["consul"]),
    ("reqwest", &["consul"]),
    ("http02", &["consul"]),
    ("hyper014", &["consul"]),
    ("hickory_resolver", &["client"]),
    ("clap", &["demo"]),
    ("axum", &["testkit"]),
];

fn sources(below: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(below).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// Every source with the module it belongs to.
fn modules() -> Vec<(String, PathBuf)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    sources(&src, &mut found);
    found
        .into_iter()
        .filter_map(|path| {
            let module = path.strip_prefix(&src).unwrap().iter().next()?.to_str()?.to_owned();
            (module != "lib.rs" && module != "bin").then_some((module, path))
        })
        .collect()
}

/// The lines of code: no comments, no tests' modules (those may name what they hold against).
fn code(path: &Path) -> Vec<String> {
    if path.iter().any(|part| part == "tests.rs" || part == "tests") {
        return Vec::new();
    }
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines().peekable();
    let mut code = Vec::new();
    while let Some(line) = lines.next() {
        // A module in the file ends it; one declared at the top is in a file of its own.
        if line == "#[cfg(test)]" && lines.peek().is_some_and(|next| next.ends_with('{')) {
            break;
        }
        if !line.trim_start().starts_with("//") {
            code.push(line.to_owned());
        }
    }
    code
}

#[test]
fn each_module_names_only_what_it_may() {
    let mut wrong = Vec::new();
    for (module, path) in modules() {
        let may = MAY_NAME.iter().find(|(name, _)| *name == module);
        let (_, may) = may.unwrap_or_else(|| panic!("{module} has no line in the table"));
        for line in code(&path) {
            for named in line.split("crate::").skip(1) {
                let first: Vec<_> = named
                    .trim_start_matches('{')
                    .split(|c: char| !c.is_alphanumeric() && c != '_')
                    .take(1)
                    .collect();
                // A list of names, `crate::{A, b::C}`, is read name by name.
                let names = match named.strip_prefix('{') {
                    Some(list) => list
                        .split([',', '}'])
                        .map(|name| name.trim().split("::").next().unwrap_or_default())
                        .filter(|name| !name.is_empty() && *name != ";")
                        .collect(),
                    None => first,
                };
                for name in names {
                    if !may.contains(&name) {
                        wrong.push(format!("{}: {line}", path.display()));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "named against the rules:\n{}", wrong.join("\n"));
}

#[test]
fn fenced_crates_stay_behind_their_fences() {
    let mut wrong = Vec::new();
    for (module, path) in modules() {
        for line in code(&path) {
            for (fenced, homes) in FENCED {
                let named = line.contains(&format!("{fenced}::")) || line.contains(&format!("use {fenced}"));
                if named && !homes.contains(&module.as_str()) {
                    wrong.push(format!("{}: {line}", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "named outside of its module:\n{}", wrong.join("\n"));
}

#[test]
fn the_lease_names_neither_grpc_nor_consul() {
    let lease = Path::new("server").join("lease");
    let (mut looked_at, mut wrong) = (0, Vec::new());
    for (_, path) in modules() {
        if path.iter().collect::<PathBuf>().to_string_lossy().contains(&*lease.to_string_lossy()) {
            looked_at += 1;
            let names = |line: &String| {
                ["tonic::", "consul::", "http::", "fence::"].iter().any(|it| line.contains(it))
            };
            wrong.extend(code(&path).into_iter().filter(names));
        }
    }
    assert!(looked_at > 5 && wrong.is_empty(), "{looked_at} files: {wrong:?}");
}

#[test]
fn no_source_is_longer_than_400_lines_without_its_tests() {
    let lines = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        let tests = lines.windows(2).position(|w| w[0] == "#[cfg(test)]" && w[1].ends_with('{'));
        tests.unwrap_or(lines.len())
    };
    let long: Vec<_> = modules()
        .into_iter()
        .filter(|(_, path)| !path.iter().any(|part| part == "tests.rs" || part == "tests"))
        .map(|(_, path)| (lines(&path), path))
        .filter(|(lines, _)| *lines > 400)
        .collect();
    assert!(long.is_empty(), "{long:?}");
}

/// Tables whose rows name tests in their last column: the page, how its rows begin, and
/// how many there are at least.
const SHOWN: &[(&str, &str, usize)] =
    &[("docs/requirements.md", "| R", 29 + 23 + 28), ("docs/judging.md", "| J", 34)];

#[test]
fn each_row_of_a_table_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    sources(&root.join("src"), &mut found);
    sources(&root.join("tests"), &mut found);
    let all: String = found.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let mut missing = Vec::new();
    for (page, begin, at_least) in SHOWN {
        let table = fs::read_to_string(root.join(page)).unwrap();
        let rows: Vec<_> = table.lines().filter(|line| line.starts_with(begin)).collect();
        assert!(rows.len() >= *at_least, "{page}: every one has its row");
        for row in rows {
            let last = row.trim_end_matches([' ', '|']).rsplit('|').next().unwrap_or_default();
            let tests: Vec<_> = last.split('`').skip(1).step_by(2).collect();
            assert!(!tests.is_empty(), "{page}: no test: {row}");
            let none = tests.into_iter().filter(|test| !all.contains(&format!("fn {test}(")));
            missing.extend(none.map(str::to_owned));
        }
    }
    assert!(missing.is_empty(), "no such test: {missing:?}");
}

/// Only those of `tests/judging` run with tonic's `server` feature on and off.
#[test]
fn each_row_of_the_table_of_judging_is_made_to_happen_with_tonics_server_and_without() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    sources(&root.join("tests/judging"), &mut found);
    let all: String = found.iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let table = fs::read_to_string(root.join("docs/judging.md")).unwrap();
    for row in table.lines().filter(|line| line.starts_with("| J")) {
        let named = row.split('`').skip(1).step_by(2);
        assert!(named.into_iter().any(|name| all.contains(&format!("fn {name}("))), "no such test: {row}");
    }
}

#[test]
fn judging_without_tonics_server_is_of_the_very_versions_of_the_package() {
    let packages = |lock: &str| {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(lock)).unwrap();
        let lines: Vec<_> = text.lines().map(str::to_owned).collect();
        let named = lines.windows(2).filter(|pair| pair[0].starts_with("name = "));
        named.map(|pair| pair.join(", ")).collect::<Vec<_>>()
    };
    let all = packages("Cargo.lock");
    let mut other = packages("tests/client_only/Cargo.lock");
    assert!(other.len() > 100);
    other.retain(|package| !all.contains(package) && !package.contains("judging-without-server"));
    assert!(
        other.is_empty(),
        "copy Cargo.lock over it, and let cargo take out what is not needed: {other:?}"
    );
}
