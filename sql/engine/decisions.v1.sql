-- Purpose:    decisions on transactions over several nodes. A node's row says that the transaction is committed: the
--             row is of the same transaction there, so it is there if and only if that was committed. A row that says
--             the opposite was put there by who ended the transaction in its client's place.
-- Locks:      decide, settle: ROW EXCLUSIVE on shardids.decision until commit. settle waits for a client that is
--             deciding on the same transaction.
-- Privileges: CREATE on schema shardids.
--
-- The name of a transaction is a hash of a secret that only its client has. The name is in pg_prepared_xacts, where
-- everybody can read it; nobody but the client can enter or forget a decision to commit it.

create table shardids.decision (
  transaction uuid        primary key,
  committed   boolean     not null,
  decided_in  xid8        not null default pg_current_xact_id(),
  decided_at  timestamptz not null default clock_timestamp()
);

comment on table shardids.decision is 'Transactions over several nodes on which this node has decided';
comment on column shardids.decision.transaction is 'shardids.transaction_of(the client''s secret)';
comment on column shardids.decision.committed is 'false: ended for its client, which can''t commit it any more';

create function shardids.transaction_of(secret bytea) returns uuid
language sql immutable parallel safe
return encode(substr(sha256(secret), 1, 16), 'hex')::uuid;

comment on function shardids.transaction_of(bytea) is 'The name of the transaction over several nodes with this secret';

-- The other nodes commit what they have prepared as soon as this transaction is committed, so its COMMIT must not
-- return before it is on disk. Decisions that nobody needs any more are named by their secrets, too.
create function shardids.decide(secret bytea, ended bytea[] default '{}') returns void
language plpgsql volatile parallel unsafe security definer set search_path = pg_catalog, pg_temp as $$
declare
  this constant uuid := shardids.transaction_of(secret);
begin
  if secret is null or length(secret) < 16 then
    raise exception using errcode = 'SI007', message = 'the secret of a transaction over several nodes has at least 16 bytes';
  end if;
  if current_setting('synchronous_commit') in ('off', 'local') then
    perform set_config('synchronous_commit', 'on', true);
  end if;
  insert into shardids.decision (transaction, committed) values (this, true)
  on conflict do nothing;
  if not found then
    raise exception using
      errcode = 'SI010',
      message = format('transaction %s has been ended already, by shardids transactions --resolve [node "%s"]',
                       this, (select n.name from shardids.node n)),
      hint = 'It is rolled back on all nodes. It can be run again.';
  end if;
  if ended <> '{}' then
    delete from shardids.decision d
    where d.committed
      and d.transaction = any (array(select shardids.transaction_of(one) from unnest(ended) one));
  end if;
end
$$;

comment on function shardids.decide(bytea, bytea[]) is
  'Commits, with the calling transaction, what other nodes have prepared for it';

-- From the moment that this is committed the client can't decide otherwise.
create function shardids.settle(name uuid) returns boolean
language plpgsql volatile parallel unsafe set search_path = pg_catalog, pg_temp as $$
begin
  insert into shardids.decision (transaction, committed) values (settle.name, false)
  on conflict do nothing;
  return (select d.committed from shardids.decision d where d.transaction = settle.name);
end
$$;

comment on function shardids.settle(uuid) is
  'Whether a transaction over several nodes is committed; if it is not yet, it can''t be any more';

-- For transactions that are prepared nowhere. A refusal stays while the client may still try to decide: its
-- transaction here is older than the refusal.
create function shardids.forget_decisions(names uuid[]) returns bigint
language sql volatile parallel unsafe set search_path = pg_catalog, pg_temp
begin atomic
  with forgotten as (
    delete from shardids.decision d
    where d.transaction = any (names)
      and (d.committed or d.decided_in < pg_snapshot_xmin(pg_current_snapshot()))
    returning 1)
  select count(*) from forgotten;
end;

comment on function shardids.forget_decisions(uuid[]) is
  'Deletes decisions on transactions that are prepared nowhere any more; returns how many';

revoke execute on function
  shardids.transaction_of(bytea), shardids.decide(bytea, bytea[]), shardids.settle(uuid),
  shardids.forget_decisions(uuid[])
  from public;
