"""Items: all in the session of their owner's shard."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import HTTPException
from sqlmodel import Session, col, func, select

from fullstack.models import Item, ItemChange, ItemPublic, ItemsPublic, NewItem, User
from shardids import PageQuery


def page(session: Session, owner: User, limit: int, after: int | None) -> ItemsPublic:
    """A user's items, newest first: the order of IDs is that of time."""
    mine = select(Item).where(Item.owner_id == owner.id)
    query = PageQuery(mine, col(Item.id), limit=limit, after=after, newest_first=True)
    found = query.page(session.scalars(query.statement))
    count = session.exec(select(func.count()).select_from(Item).where(Item.owner_id == owner.id)).one()
    public = [ItemPublic.model_validate(item) for item in found.items]
    return ItemsPublic(data=public, count=count, after=found.after)


def add(session: Session, owner: User, new: NewItem) -> ItemPublic:
    """Make an item."""
    item = Item.model_validate(new, update={"owner_id": owner.id})
    session.add(item)
    session.commit()
    return ItemPublic.model_validate(item, from_attributes=True)


def find(session: Session, owner: User, item_id: int) -> Item:
    """A user's item; of others' items, in whatever shard, the answer does not tell that they exist."""
    item = session.exec(select(Item).where(Item.id == item_id, Item.owner_id == owner.id)).one_or_none()
    if item is None:
        raise HTTPException(404, "there is no such item")
    return item


def change(session: Session, item: Item, wanted: ItemChange) -> ItemPublic:
    """Change an item."""
    changes = wanted.model_dump(exclude_unset=True)
    if changes.get("title", "") is None:
        raise HTTPException(422, "an item has a title")
    item.sqlmodel_update(changes)
    session.commit()
    return ItemPublic.model_validate(item, from_attributes=True)


def delete(session: Session, owner: User, ids: Collection[int]) -> int:
    """Delete all of these items, or none; return how many they are."""
    wanted = set(ids)
    mine = session.exec(select(Item).where(col(Item.id).in_(wanted), Item.owner_id == owner.id)).all()
    if len(mine) < len(wanted):
        raise HTTPException(404, "there is no such item")
    for item in mine:
        session.delete(item)
    session.commit()
    return len(mine)
