-- Purpose:    takes away what decisions.v1.sql made.
-- Locks:      ACCESS EXCLUSIVE on shardids.decision.
-- Privileges: ownership of schema shardids.

drop function shardids.decide(bytea, bytea[]), shardids.settle(uuid), shardids.forget_decisions(uuid[]),
  shardids.transaction_of(bytea);
drop table shardids.decision;
