"""What the shop does."""

from collections.abc import Mapping
from decimal import Decimal

from sqlalchemy import func, select

from shop.database import Session
from shop.models import Address, Order, OrderItem, Product, User


def sign_up(email: str, country: str, street: str) -> int:
    """Return the ID of a new user. An e-mail address that has one already is an IntegrityError."""
    with Session.begin() as session:
        user = User(email=email, country_code=country)
        session.add(user)
        session.flush()
        session.add(Address(user_id=user.id, street=street))
        return user.id


def find_user(email: str) -> int | None:
    """Return the ID of the user who logs in with an e-mail address."""
    with Session() as session:
        return session.scalar(select(User.id).where(User.email == email))


def place_order(user_id: int, quantities: Mapping[int, int]) -> int:
    """Return the ID of a new order, of so many of each product."""
    with Session.begin() as session:
        products = session.scalars(select(Product).where(Product.id.in_(quantities)))
        items = [OrderItem(product_id=p.id, quantity=quantities[p.id], price=p.price) for p in products]
        address = session.scalars(select(Address.id).where(Address.user_id == user_id).limit(1)).one()
        order = Order(user_id=user_id, address_id=address, items=items)
        session.add(order)
        session.flush()
        return order.id


def total(order_id: int) -> Decimal:
    """Return what an order costs."""
    with Session() as session:
        cost = func.sum(OrderItem.price * OrderItem.quantity)
        return session.scalars(select(cost).where(OrderItem.order_id == order_id)).one()
