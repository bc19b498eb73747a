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
  moved_to_account_id bigint references accounts on delete set null,
  created_at timestamp not null default now());
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
"""IDs by a function of the time, rows that lose their owner, and a large table beside the root."""

PAGILA: Final = """
create table country (country_id serial primary key, country text not null);
create table address (
  address_id serial primary key, address text not null,
  country_id integer not null references country on update cascade on delete restrict);
create table customer (
  customer_id serial primary key, first_name text not null,
  address_id integer not null references address on update cascade on delete restrict,
  last_update timestamptz not null default now());
create table rental (
  rental_id serial primary key, rental_date timestamptz not null default now(),
  customer_id integer not null references customer on update cascade on delete restrict);
create table payment (
  payment_id integer not null generated always as identity, customer_id integer not null,
  rental_id integer not null, amount numeric(5, 2) not null, payment_date timestamptz not null,
  primary key (payment_date, payment_id)) partition by range (payment_date);
create table payment_p01 partition of payment for values from ('2024-01-01 UTC') to ('2024-02-01 UTC');
create table payment_p02 partition of payment for values from ('2024-02-01 UTC') to ('2024-03-01 UTC');
alter table payment_p01 add foreign key (customer_id) references customer;
alter table payment_p02 add foreign key (customer_id) references customer;
alter table payment_p01 add foreign key (rental_id) references rental;
alter table payment_p02 add foreign key (rental_id) references rental;
create function last_updated() returns trigger language plpgsql as
  'begin new.last_update = current_timestamp; return new; end';
create trigger last_updated before update on customer for each row execute function last_updated();
create view customer_list as
  select c.customer_id, c.first_name, a.address from customer c join address a using (address_id);
insert into country (country) values ('Austria'), ('Germany');
insert into address (address, country_id) select 'street ' || n, 1 + n % 2 from generate_series(1, 90) n;
insert into customer (first_name, address_id) select 'name ' || n, n from generate_series(1, 90) n;
insert into rental (customer_id) select 1 + n % 90 from generate_series(1, 300) n;
insert into payment (customer_id, rental_id, amount, payment_date)
select customer_id, rental_id, 1.5, timestamptz '2024-01-01 UTC' + rental_id * interval '4 hours' from rental;
analyze;
"""
"""Foreign keys of each partition instead of the table, keys that are changed by ON UPDATE CASCADE."""

LEMMY: Final = """
create table site (id serial primary key, name text not null);
create table person (
  id serial primary key, name text not null, published timestamptz not null default now(),
  site_id integer references site);
create table community (
  id serial primary key, name text not null, description text, published timestamptz not null default now());
create table post (
  id serial primary key, name text not null,
  creator_id integer not null references person on update cascade on delete cascade,
  community_id integer not null references community on update cascade on delete cascade);
create table comment (
  id serial primary key,
  creator_id integer not null references person on update cascade on delete cascade,
  post_id integer not null references post on update cascade on delete cascade,
  content text not null, path text);
create table community_follower (
  community_id integer not null references community on update cascade on delete cascade,
  person_id integer not null references person on update cascade on delete cascade,
  primary key (person_id, community_id));
create table language (id serial primary key, code text);
insert into site (name) values ('here');
insert into person (name, site_id) select 'person ' || n, 1 from generate_series(1, 300) n;
insert into community (name, description)
select 'community ' || n, repeat('x', 200) from generate_series(1, 400) n;
insert into post (name, creator_id, community_id)
select 'post', 1 + n % 300, 1 + n % 400 from generate_series(1, 900) n;
insert into comment (creator_id, post_id, content)
select 1 + n * 7 % 300, n, 'text' from generate_series(1, 900) n;
insert into community_follower
select 1 + n % 400, 1 + n % 300 from generate_series(1, 1200) n on conflict do nothing;
insert into language (code) values ('de');
analyze;
"""
"""A table as large as the root that rows of all owners refer to, and comments beside the posts of others."""

GITLAB: Final = """
create table namespaces (id bigserial primary key, name text not null);
create table projects (id bigserial primary key, namespace_id bigint not null, path text not null);
create table issues (
  id bigserial primary key, project_id bigint not null, author_id bigint, title text not null,
  closed_at timestamptz);
create table notes (
  id bigserial primary key, project_id bigint, noteable_id bigint, noteable_type text,
  author_id bigint, note text);
create table merge_requests (
  id bigserial primary key, target_project_id bigint not null, source_project_id bigint, title text);
create table labels (id bigserial primary key, project_id bigint, title text not null);
create table label_links (id bigserial primary key, label_id bigint not null, issue_id bigint not null);
create table users (id bigserial primary key, email text not null unique);
create table odd (id bigserial primary key, project_id text);
create table stray (id bigserial primary key, project_id bigint not null);
insert into namespaces (name) values ('one'), ('two');
insert into projects (namespace_id, path) select 1 + n % 2, 'p' || n from generate_series(1, 200) n;
insert into users (email) select n || '@example.org' from generate_series(1, 50) n;
insert into issues (project_id, author_id, title)
select 1 + n % 200, 1 + n % 50, 't' from generate_series(1, 800) n;
insert into notes (project_id, note) select nullif(n % 201, 0), 'n' from generate_series(1, 800) n;
insert into merge_requests (target_project_id) select 1 + n % 200 from generate_series(1, 400) n;
insert into labels (project_id, title) select 1 + n % 200, 'l' from generate_series(1, 200) n;
insert into label_links (label_id, issue_id) select 1 + n % 200, 1 + n % 800 from generate_series(1, 200) n;
insert into stray (project_id) select 1000 + n from generate_series(1, 100) n;
analyze;
"""
"""No foreign key at all: columns are called after the table that they refer to."""
