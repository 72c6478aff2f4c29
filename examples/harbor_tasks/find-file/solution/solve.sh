#!/bin/sh
grep -rl pelican birds > answer.txt
