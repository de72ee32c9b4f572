"""Pipeline schedules: made, proved and simulated on plain numbers, and stages cut by time and memory."""
