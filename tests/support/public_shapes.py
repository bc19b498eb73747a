"""Shapes of schemas that public applications have, written anew: what makes them hard to split, and no more.

Each has the smallest set of tables in which the shape shows, and some rows.
"""

from __future__ import annotations

from typing import Final

MASTODON: Final = """
create function timestamp_id(table_name text) returns bigint language sql volatile as $$
  select (floor(extract(epoch from clock_timestamp()) * 1000)::bigint << 16) | (random() * 65535)::bigint $$;
create table accounts (
  id bigint primary key default timestamp_id('accounts'), username text not null,
  moved_to_account_id bigint references accounts on delete set null, created_at timestamp not null default now());
create table conversations (id bigserial primary key, uri text, updated_at timestamp not null default now());
create table statuses (
  id bigint primary key default timestamp_id('statuses'), account_id bigint not null references accounts
    on delete cascade,
  conversation_id bigint references conversations on delete set null,
  in_reply_to_id bigint references statuses on delete set null, text text not null default '');
create table media_attachments (
  id bigint primary key default timestamp_id('media_attachments'),
  account_id bigint references accounts on delete set null,
  status_id bigint references statuses on delete set null, file_name text);
create table account_stats (
  id bigserial primary key, account_id bigint not null unique references accounts on delete cascade,
  statuses_count bigint not null default 0);
create table custom_emojis (id bigserial primary key, shortcode text not null);
insert into accounts (id, username)
select (1700000000000 + n * 60000 << 16) + n * 7919 % 65536, 'user' || n from generate_series(1, 300) n;
insert into conversations (uri) select 'tag:' || n from generate_series(1, 200) n;
insert into statuses (id, account_id, conversation_id)
select (1700000000000 + n * 60000 << 16) + n * 104729 % 65536, a.id, 1 + n % 200
from (select id, row_number() over (order by id) as r from accounts) a, generate_series(1, 900) n
where a.r = 1 + n % 300;
insert into media_attachments (id, account_id, status_id)
select id + 5, case when id % 10 = 0 then null else account_id end, id from statuses;
insert into account_stats (account_id) select id from accounts;
insert into custom_emojis (shortcode) values ('blob');
analyze;
"""
"""IDs by a function of the time, rows whose owner is deleted from under them, a large table beside the root."""
