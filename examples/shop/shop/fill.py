"""Makes the shop's database and its first year: python -m shop.fill"""

import os
import subprocess
import sys

from sqlalchemy import create_engine, make_url, text

ROWS = """
    insert into countries values ('AT', 'Austria'), ('DE', 'Germany'), ('CH', 'Switzerland');
    insert into products (name, price) select 'product ' || n, n / 4.0 from generate_series(1, 40) n;
    insert into users (email, country_code, created_at)
    select 'user' || n || '@example.org', (array['AT', 'DE', 'CH'])[1 + n % 3], now() - n * interval '90 min'
    from generate_series(5000, 1, -1) n;
    insert into addresses (user_id, street) select id, 'Street ' || id from users order by id;
    insert into orders (user_id, address_id, created_at)
    select 1 + n * 7 % 5000, 1 + n * 7 % 5000, now() - (20000 - n) * interval '26 min'
    from generate_series(1, 20000) n;
    insert into order_items select o.id, 1 + (o.id + n * 11) % 40, n, 1 + n
    from orders o, generate_series(1, 3) n;
    analyze;"""


def main() -> None:
    """Make the database, its tables, and its rows."""
    url = make_url(os.environ["SHOP_DATABASE"]).set(drivername="postgresql+psycopg")
    server = create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    with server.connect() as connection:
        connection.execute(text(f'create database "{url.database}"'))
    subprocess.run([sys.executable, "-m", "alembic", "upgrade", "head"], check=True)
    with create_engine(url).begin() as connection:
        connection.execute(text(ROWS))
    print("5,000 users, 20,000 orders, 60,000 items")


if __name__ == "__main__":
    main()
