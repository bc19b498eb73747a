-- Purpose:    the generator of one shard, in the shard's schema: two sequences and four functions.
-- Settings:   shardids.shard, set by shardids.enter_shard(shard)
-- Locks:      none beyond those of CREATE.
-- Privileges: membership in the owner of schema shardids.

do $do$ begin perform shardids.create_generator(current_setting('shardids.shard')::integer); end $do$;
