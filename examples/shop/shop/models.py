"""The shop's tables."""

from datetime import datetime
from decimal import Decimal

from sqlalchemy import DateTime, ForeignKey, Numeric, Text, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

TYPES = {str: Text, Decimal: Numeric(10, 2), datetime: DateTime(timezone=True)}


class Base(DeclarativeBase):
    """The tables of the shop's database."""

    type_annotation_map = TYPES


class Country(Base):
    """Where the shop delivers to."""

    __tablename__ = "countries"

    code: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]


class Product(Base):
    """What the shop sells."""

    __tablename__ = "products"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    price: Mapped[Decimal]


class User(Base):
    """Who buys."""

    __tablename__ = "users"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(unique=True)
    country_code: Mapped[str] = mapped_column(ForeignKey("countries.code"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Address(Base):
    """Where a user's orders are sent."""

    __tablename__ = "addresses"

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    street: Mapped[str]


class Order(Base):
    """What a user bought at one time."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"), index=True)
    address_id: Mapped[int] = mapped_column(ForeignKey("addresses.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    items: Mapped[list["OrderItem"]] = relationship()


class OrderItem(Base):
    """One product of an order."""

    __tablename__ = "order_items"

    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"), primary_key=True)
    product_id: Mapped[int] = mapped_column(ForeignKey("products.id"), primary_key=True)
    quantity: Mapped[int]
    price: Mapped[Decimal]
