"""Users and items. A user's items live in the user's shard, so a request opens one shard.

Only ``User`` and ``Item`` are tables; the other classes are what the API takes and returns.
"""

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BeforeValidator, StringConstraints
from sqlalchemy import BigInteger, Column, DateTime
from sqlmodel import Field, Relationship, SQLModel

from shardids import Cluster, ShardId, primary_key

EXACT_IN_JAVASCRIPT = 2**53 - 1


def refuse_rounded(value: object) -> object:
    """Refuse a number that a JavaScript client may have rounded before it was sent."""
    if isinstance(value, int) and abs(value) > EXACT_IN_JAVASCRIPT:
        raise ValueError("send the ID as a string: as a JSON number it may have been rounded")
    return value


SentId = Annotated[ShardId, BeforeValidator(refuse_rounded)]
"""An ID in the body of a request."""

Email = Annotated[
    str, StringConstraints(to_lower=True, strip_whitespace=True, pattern=r"^[^@\s]+@[^@\s]+$", max_length=255)
]
FullName = Annotated[str, StringConstraints(max_length=255)]
Password = Annotated[str, StringConstraints(min_length=8, max_length=128)]
Title = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Description = Annotated[str, StringConstraints(max_length=255)]


def now() -> datetime:
    """The time at which a row is made."""
    return datetime.now(UTC)


class User(SQLModel, table=True):
    """Somebody with items. The shard is that of the address at sign-up; from then on the ID tells it."""

    id: ShardId = Field(default=None, sa_column=primary_key("id"))
    email: str = Field(max_length=255, unique=True)
    is_active: bool = True
    is_superuser: bool = False
    full_name: str | None = Field(default=None, max_length=255)
    hashed_password: str
    created_at: datetime = Field(
        default_factory=now, sa_column=Column(DateTime(timezone=True), nullable=False)
    )
    items: list["Item"] = Relationship(back_populates="owner", passive_deletes="all")


class Item(SQLModel, table=True):
    """Something that a user has, in the user's shard."""

    id: ShardId = Field(default=None, sa_column=primary_key("id"))
    owner_id: ShardId = Field(sa_type=BigInteger, foreign_key="user.id", ondelete="CASCADE", index=True)
    title: str = Field(max_length=255)
    description: str | None = Field(default=None, max_length=255)
    created_at: datetime = Field(
        default_factory=now, sa_column=Column(DateTime(timezone=True), nullable=False)
    )
    owner: User = Relationship(back_populates="items")


class SignUp(SQLModel):
    """What a user is made of."""

    email: Email
    password: Password
    full_name: FullName | None = None


class LogIn(SQLModel):
    """Who asks for a token."""

    email: Email
    password: str


class Token(SQLModel):
    """What the header ``Authorization: Bearer …`` takes."""

    access_token: str
    token_type: Literal["bearer"] = "bearer"  # noqa: S105 -- no password


class UserChange(SQLModel):
    """What users may change about themselves."""

    email: Email | None = None
    full_name: FullName | None = None


class UserPublic(SQLModel):
    """A user, as others see it."""

    id: ShardId
    email: str
    is_active: bool
    is_superuser: bool
    full_name: str | None
    created_at: datetime


class UsersPublic(SQLModel):
    """Some users, newest first, how many there are, and what to ask for the users that follow."""

    data: list[UserPublic]
    count: int
    after: ShardId | None


class NewItem(SQLModel):
    """What an item is made of."""

    title: Title
    description: Description | None = None


class ItemChange(SQLModel):
    """What may change about an item."""

    title: Title | None = None
    description: Description | None = None


class ItemPublic(SQLModel):
    """An item, as its owner sees it."""

    id: ShardId
    owner_id: ShardId
    title: str
    description: str | None
    created_at: datetime


class ItemsPublic(SQLModel):
    """Some items, newest first, how many there are, and what to ask for the items that follow."""

    data: list[ItemPublic]
    count: int
    after: ShardId | None


class ItemIds(SQLModel):
    """Which items are meant."""

    ids: Annotated[list[SentId], Field(min_length=1, max_length=100)]


def create_tables(cluster: Cluster) -> None:
    """Make the tables in every shard; an application of your own migrates them."""
    for shard in cluster.placement.all_shards():
        with cluster.at(shard=shard).engine.begin() as connection:
            SQLModel.metadata.create_all(connection)
