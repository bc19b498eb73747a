"""A shop's database as applications have them: serial keys, foreign keys, partitions, enums, odd names."""

SHOP = """
create schema billing;
create type order_state as enum ('new', 'paid', 'sent');
create domain email_address as text check (value like '%@%');
create function touch() returns trigger language plpgsql as 'begin new.changed_at = now(); return new; end';

create table countries (code char(2) primary key, name text not null);
create table products (
  id bigserial primary key, name text not null, price numeric(10, 2) not null,
  made_in char(2) references countries (code));
create table users (
  id bigint generated always as identity primary key, email email_address not null unique, name text not null,
  country char(2) not null references countries (code), default_address bigint,
  created_at timestamptz not null default now());
create table addresses (
  id bigserial primary key, user_id bigint not null references users (id) on delete cascade,
  street text not null, unique (user_id, id));
alter table users add foreign key (default_address) references addresses (id) deferrable initially deferred;
create table orders (
  id serial primary key, user_id bigint not null references users (id),
  ship_to bigint not null references addresses (id), number bigserial unique,
  state order_state not null default 'new', created_at timestamptz not null default now(),
  changed_at timestamptz);
create index on orders (user_id);
create trigger touched before update on orders for each row execute function touch();
create table order_items (
  order_id integer not null references orders (id), line integer not null,
  product_id bigint not null references products (id), quantity integer not null default 1,
  price numeric(10, 2), total numeric generated always as (quantity * price) stored,
  primary key (order_id, line));
create table "Order Notes" (
  "Id" uuid primary key default gen_random_uuid(), "Order" integer not null references orders (id),
  "the text" text);
create table messages (
  id bigserial primary key, sender_id bigint not null references users (id),
  recipient_id bigint not null references users (id), reply_to bigint references messages (id), body text);
create table billing.invoices (
  user_id bigint not null references public.users (id), number integer not null, total numeric,
  issued date not null, primary key (user_id, number, issued)) partition by range (issued);
create table billing.invoices_2025 partition of billing.invoices
  for values from ('2025-01-01') to ('2026-01-01');
create table billing.invoices_2026 partition of billing.invoices
  for values from ('2026-01-01') to ('2027-01-01');
create table audit_log (id bigserial primary key, user_id bigint, what text, at timestamptz default now());
create table settings (name text primary key, value text);
create view paid_orders as select * from orders where state = 'paid';
create materialized view sales as select product_id, sum(quantity) from order_items group by 1;
alter table messages enable row level security;
create policy own_messages on messages using (true);

insert into countries select chr(65 + n) || chr(90 - n), 'country ' || n from generate_series(0, 9) n;
insert into products (name, price, made_in)
select 'product ' || n, n, chr(65 + n % 10) || chr(90 - n % 10) from generate_series(1, 50) n;
insert into users (email, name, country, created_at)
select n || '@example.org', 'user ' || n, chr(65 + n % 10) || chr(90 - n % 10), now() - n * interval '1 hour'
from generate_series(1, 400) n;
insert into addresses (user_id, street) select id, 'street ' || id from users;
update users set default_address = addresses.id from addresses where addresses.user_id = users.id;
insert into orders (user_id, ship_to, created_at)
select 1 + n % 400, 1 + n % 400, now() - n * interval '1 hour' from generate_series(1, 1000) n;
insert into orders (user_id, ship_to) select 1, 1 from generate_series(1, 200);
insert into order_items (order_id, line, product_id, price)
select 1 + n / 3, n % 3, 1 + n % 50, n from generate_series(0, 2999) n;
insert into "Order Notes" ("Order", "the text") select n, 'note' from generate_series(1, 100) n;
-- One of 2,000 is to its sender.
insert into messages (sender_id, recipient_id, body)
select 1 + n % 400, 1 + (n + case when n = 7 then 0 else 1 end) % 400, 'hello'
from generate_series(0, 1999) n;
update messages set reply_to = id - 400 where id > 400;
insert into billing.invoices select 1 + n % 400, n, n, date '2025-06-01' + n from generate_series(1, 500) n;
insert into audit_log (user_id, what) select 1 + n % 400, 'login' from generate_series(1, 100) n;
insert into settings values ('theme', 'dark');
analyze;
"""
