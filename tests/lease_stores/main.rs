//! One suite of cases for every store of a lease, and what is Consul's alone.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

#[path = "../common/mod.rs"]
mod common;

mod cases;
mod consul;
mod consul_cluster;
mod lengths;
mod places;

/// Runs each case on one kind of store: a function of this name in `places` makes one, or
/// says why there is none.
macro_rules! suite {
    ($place:ident) => {
        suite! { $place:
            nobody_holds_a_lease_at_first_and_whoever_asks_gets_it,
            one_with_an_older_record_is_refused_and_changes_nothing,
            a_renewal_changes_the_heartbeat_alone_and_each_time,
            a_renewal_that_was_not_seen_stands_against_a_takeover,
            after_a_takeover_nothing_of_the_deposed_is_done,
            after_a_release_nothing_more_is_done_and_the_next_has_it_at_once,
            a_release_names_its_successor,
            a_holders_length_is_kept_and_may_be_missing,
            the_same_process_may_begin_a_new_term_and_ends_its_old_one_by_it,
            of_many_at_the_same_instant_one_wins_each_time,
            what_was_written_is_loaded_and_a_version_is_replaced_once,
            the_same_write_once_more_is_a_conflict_and_the_sequence_tells,
            of_many_writes_on_one_version_one_is_done,
            a_value_is_taken_up_to_the_limit,
            a_key_that_is_none_is_refused,
            a_record_that_is_not_understood_is_nobodys_and_is_replaced,
            after_everything_is_deleted_the_token_goes_on_where_a_store_lives,
            a_value_that_is_not_understood_says_so,
            whoever_waits_is_woken_by_a_change,
            whoever_waits_in_vain_is_told_so_in_time,
        }
    };
    ($place:ident: $($case:ident),* $(,)?) => {
        mod $place {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    if let Some(place) = super::places::$place().await {
                        super::cases::$case(&*place).await;
                    }
                }
            )*
        }
    };
}

suite!(embedded);
suite!(files);
suite!(real);
