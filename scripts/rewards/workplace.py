"""The state that calls of workplace_assistant's tools leave behind: mail, calendar, plots, tasks and customers.

The environment's tables (WorkBench, arXiv:2405.00823) are not here. A state is what the calls themselves say: which
records they create, change and delete. A record that a call names is taken to exist, with contents that nobody knows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dateutil.parser import parse

Arguments = dict[str, Any]
_EVENT_FIELDS = ("event_name", "participant_email", "event_start", "duration")
_TASK_FIELDS = ("task_id", "task_name", "assigned_to_email", "list_name", "due_date", "board")
_CUSTOMER_FIELDS = (
    *("customer_id", "assigned_to_email", "customer_name", "customer_email", "customer_phone", "last_contact_date"),
    *("product_interest", "status", "follow_up_by", "notes"),
)
_LISTS = ("Backlog", "In Progress", "In Review", "Completed")
_BOARDS = ("Back end", "Front end", "Design")
_PLOTTED = ("total_visits", "session_duration_seconds", "user_engaged")
_PLOTTED += ("visits_direct", "visits_referral", "visits_search_engine", "visits_social_media")
_KINDS_OF_PLOT = ("bar", "line", "scatter", "histogram")
_CHOICES = {
    "status": ("Qualified", "Won", "Lost", "Lead", "Proposal"),
    "product_interest": ("Software", "Hardware", "Services", "Consulting", "Training"),
    "list_name": _LISTS,
    "board": _BOARDS,
}
_CASE_MATTERS = ("status", "list_name", "board")


class NoEffect(Exception):
    """A call that the tool refuses: it changes nothing."""


@dataclass
class TableChanges:
    """What was done to one table."""

    created: list[dict[str, Any]] = field(default_factory=list)
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)

    def create(self, record: dict[str, Any]) -> None:
        """Add a record at the end."""
        self.created.append({name: _folded(name, value) for name, value in record.items()})

    def change(self, key: str, name: str, value: Any) -> None:
        """Set one field of a record."""
        self._must_exist(key)
        self.changed.setdefault(key, {})[name] = _folded(name, value)

    def delete(self, key: str) -> None:
        """Take a record away, whatever was changed in it."""
        self._must_exist(key)
        self.changed.pop(key, None)
        self.deleted.add(key)

    def _must_exist(self, key: str) -> None:
        if not isinstance(key, str) or key in self.deleted:
            raise NoEffect


State = dict[str, TableChanges]


def run(calls: list[tuple[str, Arguments]]) -> State:
    """The state after calls of the tools, by name and arguments, in turn; what a tool refuses is skipped."""
    state = {name: TableChanges() for name in ("email", "calendar", "analytics", "project_management", "customers")}
    for name, arguments in calls:
        try:
            TOOLS[name](state, arguments)
        except (NoEffect, KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue
    return state


def _folded(name: str, value: Any) -> Any:
    return value.lower() if isinstance(value, str) and name not in _CASE_MATTERS else value


def _given(arguments: Arguments, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> list[Any]:
    """The required arguments' values; NoEffect where one lacks or is empty, or another is given."""
    if not set(arguments) <= {*required, *optional} or not all(arguments.get(name) for name in required):
        raise NoEffect
    return [arguments[name] for name in required]


def _must(condition: bool) -> None:
    if not condition:
        raise NoEffect


def _send(state: State, recipient: Any, subject: Any, body: str) -> None:
    state["email"].create({"recipient": recipient, "subject": subject, "body": body})


def _send_email(state: State, arguments: Arguments) -> None:
    recipient, subject, body = _given(arguments, ("recipient", "subject", "body"))
    _must("@" in recipient and "." in recipient)
    _send(state, recipient, subject, body)


def _forward_email(state: State, arguments: Arguments) -> None:
    key, recipient = _given(arguments, ("email_id", "recipient"))
    _must("@" in recipient and "." in recipient and key not in state["email"].deleted)
    _send(state, recipient, ("FW", key), ("body of", key))


def _reply_email(state: State, arguments: Arguments) -> None:
    key, body = _given(arguments, ("email_id", "body"))
    _must(key not in state["email"].deleted)
    _send(state, ("other side of", key), ("RE", key), body)


def _create_event(state: State, arguments: Arguments) -> None:
    record = dict(zip(_EVENT_FIELDS, _given(arguments, _EVENT_FIELDS), strict=True))
    for name, value in record.items():
        _check_event(name, value)
    state["calendar"].create(record)


def _is_key(table: str, key: Any) -> bool:
    """Of tables but the calendar every text may be a key."""
    return table != "calendar" or (isinstance(key, str) and len(key) == 8 and key.isdigit())


def _check_event(name: str, value: Any) -> None:
    if name == "event_start":
        parse(value)
    if name == "duration":
        _must(int(value) > 0)


def _create_plot(state: State, arguments: Arguments) -> None:
    first, last, value, kind = _given(arguments, ("time_min", "time_max", "value_to_plot", "plot_type"))
    _must(value in _PLOTTED and kind in _KINDS_OF_PLOT)
    state["analytics"].create({"file_path": f"plots/{first}_{last}_{value}_{kind}.png"})


def _create_task(state: State, arguments: Arguments) -> None:
    record = dict(zip(_TASK_FIELDS[1:], _given(arguments, _TASK_FIELDS[1:]), strict=True))
    _must(record["list_name"] in _LISTS and record["board"] in _BOARDS)
    state["project_management"].create(record)


def _add_customer(state: State, arguments: Arguments) -> None:
    _given(arguments, ("customer_name", "assigned_to_email", "status"), _CUSTOMER_FIELDS[1:])
    state["customers"].create(dict.fromkeys(_CUSTOMER_FIELDS[1:]) | {"notes": ""} | arguments)


def _updates(table: str, key_name: str, fields: tuple[str, ...]) -> Callable[[State, Arguments], None]:
    def update(state: State, arguments: Arguments) -> None:
        key, name, value = _given(arguments, (key_name, "field", "new_value"))
        _must(_is_key(table, key) and name in fields and value in _CHOICES.get(name, (value,)))
        if table == "calendar":
            _check_event(name, value)
        state[table].change(key, name, value)

    return update


def _deletes(table: str, key_name: str) -> Callable[[State, Arguments], None]:
    def delete(state: State, arguments: Arguments) -> None:
        (key,) = _given(arguments, (key_name,))
        _must(_is_key(table, key))
        state[table].delete(key)

    return delete


def _reads(state: State, arguments: Arguments) -> None:
    """Looks something up and changes nothing."""


_READING = (
    "company_directory_find_email_address",
    *("email_get_email_information_by_id", "email_search_emails"),
    *("calendar_get_event_information_by_id", "calendar_search_events"),
    *("analytics_engaged_users_count", "analytics_get_visitor_information_by_id", "analytics_traffic_source_count"),
    *("analytics_total_visits_count", "analytics_get_average_session_duration"),
    *("project_management_get_task_information_by_id", "project_management_search_tasks"),
    "customer_relationship_manager_search_customers",
)
TOOLS: dict[str, Callable[[State, Arguments], None]] = dict.fromkeys(_READING, _reads) | {
    "email_send_email": _send_email,
    "email_delete_email": _deletes("email", "email_id"),
    "email_forward_email": _forward_email,
    "email_reply_email": _reply_email,
    "calendar_create_event": _create_event,
    "calendar_delete_event": _deletes("calendar", "event_id"),
    "calendar_update_event": _updates("calendar", "event_id", _EVENT_FIELDS),
    "analytics_create_plot": _create_plot,
    "project_management_create_task": _create_task,
    "project_management_delete_task": _deletes("project_management", "task_id"),
    "project_management_update_task": _updates("project_management", "task_id", _TASK_FIELDS),
    "customer_relationship_manager_add_customer": _add_customer,
    "customer_relationship_manager_delete_customer": _deletes("customers", "customer_id"),
    "customer_relationship_manager_update_customer": _updates("customers", "customer_id", _CUSTOMER_FIELDS),
}
